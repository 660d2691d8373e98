"""The commands `replaybuf tokens ...`: create, list and revoke the bearer tokens of a service."""

from __future__ import annotations

import dataclasses
import datetime
import re
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveFloat

from replaybuf.cli.service import print_json, print_table
from replaybuf.errors import Invalid
from replaybuf.service.http.guard.token_file import StoredToken, new_token, read_tokens, read_uses, revoke_token

_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([1-9][0-9]{0,5})([mhd])")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensFile:
    """The file that stores the tokens."""

    tokens_file: Path
    """File with the hashes of the tokens. "replaybuf serve --tokens-file" reads it at the start and on SIGHUP."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokenOptions(TokensFile):
    """Role and name of a new token."""

    role: str
    """Role of the token: producer, trainer, reader or operator."""
    name: str
    """Name of the token's owner; log and error messages show it."""
    expires_in: str | None = None
    """Time until the token expires: a whole number with m, h or d, such as 30d. Default: it does not expire."""
    run: Annotated[tuple[str, ...], Parameter(name="run", negative="")] = ()
    """Run that the token is limited to; may be repeated. Default: all runs."""
    max_calls_per_s: PositiveFloat | None = None
    """Maximum number of calls per second, on each server."""
    max_bytes_per_s: PositiveFloat | None = None
    """Maximum bytes of request bodies per second, on each server."""


def new(options: Annotated[NewTokenOptions, Parameter(name="*")]) -> None:
    """Create a token, print it once and store its hash."""
    expires_in_s = None if options.expires_in is None else _seconds(options.expires_in)
    token = new_token(
        options.role,
        options.name,
        options.tokens_file,
        now_s=time.time(),
        expires_in_s=expires_in_s,
        runs=options.run,
        max_calls_per_s=options.max_calls_per_s,
        max_bytes_per_s=options.max_bytes_per_s,
    )
    if options.json:
        print_json({"token": token})
    else:
        print(token)


def list_(options: Annotated[TokensFile, Parameter(name="*")]) -> None:
    """List the tokens, newest first: role, runs, created, last used, expires, limits; never a token itself."""
    stored = sorted(read_tokens(options.tokens_file), key=lambda token: token.created_s or 0.0, reverse=True)
    uses = read_uses(options.tokens_file)
    if options.json:
        print_json([_facts(token, uses.get(token.sha256)) for token in stored])
        return
    columns = ("id", "name", "role", "runs", "created", "used", "expires", "limits")
    print_table(columns, (_row(token, uses.get(token.sha256)) for token in stored))


def revoke(
    token: Annotated[str, Parameter(help="Name or id of the token.")],
    /,
    options: Annotated[TokensFile, Parameter(name="*")],
) -> None:
    """Remove a token by its name, or by its id where several have the name; then send SIGHUP to the service."""
    removed = revoke_token(token, options.tokens_file)
    if options.json:
        print_json(_facts(removed, None))
    else:
        print(f"revoked {removed.id} {removed.name} ({removed.role}); a running service forgets it on SIGHUP")


def _facts(token: StoredToken, used_s: float | None) -> dict[str, object]:
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "runs": list(token.runs),
        "created_s": token.created_s or None,
        "last_used_s": used_s,
        "expires_s": token.expires_s,
        "expired": token.expired(time.time()),
        "max_calls_per_s": token.max_calls_per_s,
        "max_bytes_per_s": token.max_bytes_per_s,
    }


def _row(token: StoredToken, used_s: float | None) -> list[object]:
    expires = "never" if token.expires_s is None else _date(token.expires_s)
    expires = f"{expires} (expired)" if token.expired(time.time()) else expires
    rates = ((token.max_calls_per_s, "calls/s"), (token.max_bytes_per_s, "bytes/s"))
    limits = ", ".join(f"{rate:g} {unit}" for rate, unit in rates if rate is not None)
    dates = [_date(token.created_s), _date(used_s), expires]
    return [token.id, token.name, token.role, ", ".join(token.runs) or "all", *dates, limits or "-"]


def _date(at_s: float | None) -> str:
    return f"{datetime.datetime.fromtimestamp(at_s, datetime.UTC):%Y-%m-%d}" if at_s else "-"


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if not match:
        bound = "a whole number with m, h or d, such as 30d"
        raise Invalid(f"expires_in is {text!r}; it must be {bound}", name="expires_in", value=text, bound=bound)
    return int(match[1]) * _UNITS_S[match[2]]
