"""Bearer tokens by role. A tokens file has one JSON line per token: name, role and the SHA-256 of the token."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

import msgspec

from replaybuf.errors import Forbidden, Invalid, Unauthorized

ROLES = ("producer", "trainer", "reader", "operator")


class StoredToken(msgspec.Struct, frozen=True):
    """One line of a tokens file. A plain hash is enough: the token has 256 random bits."""

    name: str
    role: str
    sha256: str


class Tokens:
    """The tokens of a service. Without a file every caller is authorised, and the service binds loopback only."""

    def __init__(self, stored: list[StoredToken] | None) -> None:
        self._by_hash = None if stored is None else {token.sha256: token for token in stored}

    @classmethod
    def read(cls, path: Path | None) -> Tokens:
        """Read a tokens file. Raises `Invalid` naming a line that does not decode."""
        if path is None:
            return cls(None)
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise Invalid(f"tokens file {path} cannot be read: {error}", name="tokens_file", value=str(path)) from error
        stored = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                stored.append(msgspec.json.decode(line, type=StoredToken))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise Invalid(f"{path}:{number}: {error}", name="tokens_file", value=number) from error
        return cls(stored)

    @property
    def open(self) -> bool:
        """Whether calls need no token."""
        return self._by_hash is None

    def check(self, authorization: str | None, allowed: frozenset[str]) -> None:
        """Check that the token has one of the allowed roles. Raises `Unauthorized` or `Forbidden`."""
        if self._by_hash is None:
            return
        scheme, _, token = (authorization or "").partition(" ")
        found = self._by_hash.get(_hash(token)) if scheme.lower() == "bearer" else None
        if found is None:
            cause = "the token was not in the tokens file when the service started" if token else "the token is missing"
            raise Unauthorized(
                f"{cause}; send the header Authorization: Bearer TOKEN (commands: --token)", name="Authorization"
            )
        roles = [*sorted(allowed), "operator"]
        if found.role not in roles:
            raise Forbidden(
                f"token {found.name!r} has the role {found.role}; this call needs {' or '.join(roles)}. Use a token "
                f"with such a role: replaybuf token new --role {roles[0]}",
                name="role",
                value=found.role,
                bound=roles,
            )


def new_token(role: str, name: str, path: Path) -> str:
    """Create a token and store its hash in the tokens file; it cannot be shown again. Raises `Invalid`."""
    if role not in ROLES:
        raise Invalid(f"role is {role!r}; it must be one of {', '.join(ROLES)}", name="role", value=role, bound=ROLES)
    if not name.strip():
        raise Invalid(f"name is {name!r}; give the name of the holder", name="name", value=name, bound="not empty")
    token = f"rb_{secrets.token_urlsafe(32)}"
    line = msgspec.json.encode(StoredToken(name, role, _hash(token))) + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(line)
    return token


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
