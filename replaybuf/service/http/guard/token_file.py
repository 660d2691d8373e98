"""The tokens file: one JSON line per token with its name, role and SHA-256, and beside it when each was last used."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from replaybuf.errors import Invalid, NotFound
from replaybuf.files import TOKENS_BYTES, read_bounded
from replaybuf.wire.config import check_run_name
from replaybuf.wire.decoding import prepared
from replaybuf.wire.names import check_string

ROLES = ("producer", "trainer", "reader", "operator")
_Rate = Annotated[float, msgspec.Meta(gt=0)]
ID_LETTERS = 8
"""First letters of the hash that name a token."""


class StoredToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a tokens file. A plain hash is enough: the token has 256 random bits.

    `created_s`, `expires_s`: seconds since the epoch, 0 = unknown, None = never. `runs` it is limited to, none = all.
    `max_bytes_per_s`: of request bodies; None = no limit.
    """

    name: str
    role: str
    sha256: str
    created_s: float = 0.0
    expires_s: float | None = None
    runs: tuple[str, ...] = ()
    max_calls_per_s: _Rate | None = None
    max_bytes_per_s: _Rate | None = None

    @property
    def id(self) -> str:
        """Short name that is different for each token."""
        return self.sha256[:ID_LETTERS]

    def expired(self, now_s: float) -> bool:
        """Return whether the token is refused at this time."""
        return self.expires_s is not None and now_s >= self.expires_s


def hash_token(token: str) -> str:
    """Return what a tokens file holds instead of the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_tokens(path: Path) -> list[StoredToken]:
    """Read a tokens file. Raises `Invalid` naming a line that does not decode."""
    try:
        lines = read_bounded(path, TOKENS_BYTES).splitlines()
    except OSError as error:
        raise Invalid(f"tokens file {path} cannot be read: {error}", name="tokens_file", value=str(path)) from error
    stored = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            stored.append(msgspec.json.decode(line, type=prepared(StoredToken)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Invalid(f"{path}:{number}: {error}", name="tokens_file", value=number) from error
    return stored


def new_token(
    role: str,
    name: str,
    path: Path,
    *,
    now_s: float = 0.0,
    expires_in_s: float | None = None,
    runs: Iterable[str] = (),
    max_calls_per_s: float | None = None,
    max_bytes_per_s: float | None = None,
) -> str:
    """Create a token and store its hash in the tokens file; it cannot be shown again. Raises `Invalid`."""
    if role not in ROLES:
        raise Invalid(f"role is {role!r}; it must be one of {', '.join(ROLES)}", name="role", value=role, bound=ROLES)
    if not name.strip():
        raise Invalid(f"name is {name!r}; give the name of the holder", name="name", value=name, bound="not empty")
    check_string("name", name)
    token = f"rb_{secrets.token_urlsafe(32)}"
    expires_s = None if expires_in_s is None else now_s + expires_in_s
    limited = tuple(check_run_name(run) for run in runs)
    stored = StoredToken(name, role, hash_token(token), now_s, expires_s, limited, max_calls_per_s, max_bytes_per_s)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _changing(path):
        _end_last_line(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(_line(stored))
    return token


def revoke_token(which: str, path: Path) -> StoredToken:
    """Remove the token with this id or name from the file. Raises `NotFound`, and `Invalid` if several match."""
    with _changing(path):
        stored = read_tokens(path)
        revoked = [token for token in stored if token.id == which] or [token for token in stored if token.name == which]
        if not revoked:
            raise NotFound(f"{path} has no token with the name or id {which!r}", name="token", value=which)
        if len(revoked) > 1:
            ids = ", ".join(token.id for token in revoked)
            raise Invalid(f"{len(revoked)} tokens have the name {which!r}; revoke one by its id: {ids}", name="token")
        _replace(path, b"".join(_line(token) for token in stored if token is not revoked[0]))
    return revoked[0]


def read_uses(path: Path) -> dict[str, float]:
    """Return when tokens of a file were last used, by hash, in seconds since the epoch."""
    try:
        return msgspec.json.decode(read_bounded(_uses_of(path), TOKENS_BYTES), type=dict[str, float])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # No server has written it yet, or it is damaged.
        return {}


def write_uses(path: Path, uses: Mapping[str, float]) -> None:
    """Add to the times of last use, which several servers of one file may write. Raises `OSError`."""
    with _changing(path):
        kept = {token.sha256 for token in read_tokens(path)}
        merged = read_uses(path)
        merged |= {token: at_s for token, at_s in uses.items() if at_s > merged.get(token, 0.0)}
        _replace(_uses_of(path), msgspec.json.encode({t: at_s for t, at_s in merged.items() if t in kept}))


def _uses_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.used")


def _line(token: StoredToken) -> bytes:
    return msgspec.json.encode(token) + b"\n"


def _end_last_line(path: Path) -> None:
    """End a last line without a line break, as editors leave it: the next token would continue it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and not _ends_line(file.fileno()):
            file.write(b"\n")


def _ends_line(descriptor: int) -> bool:
    return os.pread(descriptor, 1, os.fstat(descriptor).st_size - 1) == b"\n"


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Let one process at a time change the files of a folder."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file at once, for the same owner: a server that reads it as another user must still be able to."""
    scratch = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        with contextlib.suppress(FileNotFoundError, PermissionError):
            before = path.stat()
            os.fchmod(file.fileno(), before.st_mode & 0o777)
            os.fchown(file.fileno(), before.st_uid, before.st_gid)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
