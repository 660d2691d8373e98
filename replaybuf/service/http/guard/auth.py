"""Bearer tokens by role: which caller may make which call, for which run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

import msgspec

from replaybuf.errors import Forbidden, Invalid, RateLimited, Unauthorized
from replaybuf.service.http.guard.token_file import StoredToken, hash_token, read_tokens, write_uses

logger = logging.getLogger(__name__)

LONGEST_WATCH_S = 3600.0
"""No call waits longer, and the timers of the event loop have a limit that an expiry in the far future exceeds."""
ENDED_AT_ONCE, ENDING_PAUSE_S = 32, 0.01
"""Calls that end together, and the pause until the next ones do: 2,048 at once hold the event loop for 0.3 s."""
BURST_S = 2.0


class Caller(NamedTuple):
    """Who makes a call: name of the token, "" without one, and the runs it may see; None = all."""

    name: str = ""
    runs: tuple[str, ...] | None = None

    def may_see(self, run: str) -> bool:
        """Return whether the token is for this run."""
        return self.runs is None or run in self.runs


ANYONE = Caller()
STRANGER = Caller(runs=())


class Tokens:
    """The tokens of a service. Without a file every caller is authorised, and the service binds loopback only.

    `open`: whether calls need no token.
    """

    def __init__(
        self,
        stored: Sequence[StoredToken] | None,
        path: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.open = stored is None
        self._by_hash = None if stored is None else {token.sha256: token for token in stored}
        self._path = path
        self._clock = clock
        self._uses: dict[str, float] = {}
        self._rates: dict[str, TokenRate] = {}
        self._watches: dict[asyncio.Timeout, StoredToken] = {}

    @classmethod
    def read(cls, path: Path | None, clock: Callable[[], float] = time.time) -> Tokens:
        """Read a tokens file. Raises `Invalid` naming a line that does not decode."""
        return cls(None) if path is None else cls(read_tokens(path), path, clock)

    def reload(self) -> None:
        """Read the file again; one that cannot be read changes nothing and is logged."""
        if self._path is None:
            return
        try:
            stored = read_tokens(self._path)
        except Invalid as error:
            logger.error("tokens not reloaded, the old ones stay: %s", error.detail)
            return
        before, self._by_hash = self._by_hash or {}, {token.sha256: token for token in stored}
        added, revoked = self._by_hash.keys() - before.keys(), before.keys() - self._by_hash.keys()
        logger.info("tokens reloaded tokens=%d added=%d revoked=%d", len(stored), len(added), len(revoked))
        stored_now = self._by_hash
        changed = [timeout for timeout, token in self._watches.items() if stored_now.get(token.sha256) != token]
        for place, timeout in enumerate(changed):
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time() + _turn_s(place))

    def take_uses(self) -> dict[str, float]:
        """Return when tokens were used since the last call, by hash."""
        uses, self._uses = self._uses, {}
        return uses

    def save_uses(self, uses: Mapping[str, float]) -> None:
        """Write when tokens were last used; a file that cannot be written is logged."""
        if self._path is None or not uses:
            return
        try:
            write_uses(self._path, uses)
        except (OSError, Invalid) as error:
            logger.warning("last use of tokens not written: %s", error)

    def check(
        self,
        authorization: str | None,
        allowed: frozenset[str],
        run: str | None = None,
        body_bytes: int = 0,
        *,
        lists_runs: bool = False,
    ) -> Caller:
        """Return the holder of a token that has one of the allowed roles and may be used for `run`.

        `run` is None for a call for all runs. A limited token may make it only if it `lists_runs`: the answer then has
        those that the caller may see. Raises `Unauthorized`, `Forbidden` or `RateLimited`.
        """
        if self.open:
            return ANYONE
        now_s = self._clock()
        token = self._find_valid(authorization, now_s)
        self._uses[token.sha256] = now_s
        _check_role(token, allowed)
        if not lists_runs:
            _check_run(token, run)
        if token.max_calls_per_s or token.max_bytes_per_s:
            self._rate_of(token, now_s).take(1, body_bytes, now_s)
        return _caller(token)

    def check_again(self, permission: Permission) -> None:
        """Raise what `check` raises now; count neither a use nor a call."""
        if self.open:
            return
        token = self._find_valid(permission.authorization, self._clock())
        _check_role(token, permission.roles)
        if not permission.lists_runs:
            _check_run(token, permission.run)

    @contextlib.asynccontextmanager
    async def watch(self, authorization: str | None) -> AsyncIterator[None]:
        """Run the body until the token changes or expires; then cancel the body and end without an error."""
        token = self._find(authorization)
        left_s = None
        if token and token.expires_s is not None:
            left_s = min(token.expires_s - self._clock(), LONGEST_WATCH_S) + _turn_s(len(self._watches))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s) as timeout:
                if token:
                    self._watches[timeout] = token
                try:
                    yield
                finally:
                    self._watches.pop(timeout, None)

    def recognise(self, authorization: str | None) -> Caller:
        """Return who makes a call that needs no token; where there are tokens, one without a valid one sees no run."""
        if self.open:
            return ANYONE
        token = self._find(authorization)
        return _caller(token) if token and not token.expired(self._clock()) else STRANGER

    def charge(self, authorization: str | None, body_bytes: int) -> None:
        """Count bytes of a body that did not declare its size."""
        if rate := self._rates.get(hash_token((authorization or "").partition(" ")[2])):
            rate.spend(0, body_bytes)

    def _find_valid(self, authorization: str | None, now_s: float) -> StoredToken:
        """Return the token. Raises `Unauthorized` if there is none, or if it has expired."""
        token = self._find(authorization)
        if token is None:
            sent = (authorization or "").partition(" ")[2]
            cause = "the token was not in the tokens file when it was last read" if sent else "the token is missing"
            detail = f"{cause}; send the header Authorization: Bearer TOKEN (commands: --token)"
            raise Unauthorized(detail, name="Authorization")
        if token.expired(now_s):
            detail = f"token {token.name!r} has expired; make another one: replaybuf tokens new --role {token.role}"
            raise Unauthorized(detail, name="Authorization")
        return token

    def _find(self, authorization: str | None) -> StoredToken | None:
        scheme, _, token = (authorization or "").partition(" ")
        return (self._by_hash or {}).get(hash_token(token)) if scheme.lower() == "bearer" else None

    def _rate_of(self, token: StoredToken, now_s: float) -> TokenRate:
        """Return what the token has left; a changed limit begins anew."""
        rate = self._rates.get(token.sha256)
        if rate is None or rate.token != token:
            rate = self._rates[token.sha256] = TokenRate(token, now_s)
        return rate


class Permission(msgspec.Struct, frozen=True):
    """Why a call was let through. It may end while the call waits or sends its body."""

    tokens: Tokens
    authorization: str | None
    roles: frozenset[str]
    run: str | None
    lists_runs: bool

    def check(self) -> None:
        """Raise `Unauthorized` or `Forbidden` if a new call would be refused."""
        self.tokens.check_again(self)

    def watch(self) -> AbstractAsyncContextManager[None]:
        """Run the body until `check` may raise; then cancel the body and end without an error."""
        return self.tokens.watch(self.authorization)


def _turn_s(place: int) -> float:
    """Return how long the call in this place of a queue waits until it ends."""
    return place // ENDED_AT_ONCE * ENDING_PAUSE_S


def _caller(token: StoredToken) -> Caller:
    return Caller(token.name, token.runs or None)


def _check_role(token: StoredToken, allowed: frozenset[str]) -> None:
    roles = [*sorted(allowed), "operator"]
    if token.role not in roles:
        detail = (
            f"token {token.name!r} has the role {token.role}; this call needs {' or '.join(roles)}. Use a token "
            f"with such a role: replaybuf tokens new --role {roles[0]}"
        )
        raise Forbidden(detail, name="role", value=token.role, bound=roles)


def _check_run(token: StoredToken, run: str | None) -> None:
    if token.runs and run not in token.runs:
        what = "this call is for all runs" if run is None else f"this call is for {run}"
        detail = f"token {token.name!r} is limited to the runs {', '.join(token.runs)}; {what}"
        raise Forbidden(detail, name="run", value=run, bound=list(token.runs))


class TokenRate:
    """Calls and bytes that a token may still spend: they fill by the second, up to what two seconds bring.

    A body larger than that passes when all is left, and is paid off.
    """

    def __init__(self, token: StoredToken, now_s: float) -> None:
        self.token = token
        self._buckets = [
            _Bucket(name, per_s)
            for name, per_s in (("max_calls_per_s", token.max_calls_per_s), ("max_bytes_per_s", token.max_bytes_per_s))
        ]
        self._at_s = now_s

    def take(self, calls: int, nbytes: int, now_s: float) -> None:
        """Spend calls and bytes. Raises `RateLimited`, with the time until they may be spent."""
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        for bucket, amount in zip(self._buckets, (calls, nbytes), strict=True):
            bucket.fill(passed_s)
            bucket.check(amount, self.token.name)
        self.spend(calls, nbytes)

    def spend(self, calls: int, nbytes: int) -> None:
        """Spend calls and bytes, also more than is left."""
        for bucket, amount in zip(self._buckets, (calls, nbytes), strict=True):
            bucket.left -= amount


class _Bucket:
    def __init__(self, name: str, per_s: float | None) -> None:
        self._name, self._per_s = name, per_s or float("inf")
        self._full = max(1.0, self._per_s * BURST_S)
        self.left = self._full

    def fill(self, passed_s: float) -> None:
        if self._full < float("inf"):
            self.left = min(self._full, self.left + passed_s * self._per_s)

    def check(self, amount: int, who: str) -> None:
        missing = min(amount, self._full) - self.left
        if amount and missing > 0:
            raise RateLimited(
                f"token {who!r} has {self._name} {self._per_s:g}; wait {missing / self._per_s:.1f} s, or ask the "
                "operator for a token with another limit",
                name=self._name,
                value=amount,
                bound=self._per_s,
                retry_after_s=missing / self._per_s,
            )
