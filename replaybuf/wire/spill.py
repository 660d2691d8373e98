"""Spilled frames: the URL of their folder, their paths in it, and the stub that stays in Redis.

A frame that moved out of Redis leaves a stub under its payload key: `MAGIC` and the path of the file, relative to
`spill.url` of the run. Every reader of payloads follows it: service, standby, direct mode.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import urlsplit

from replaybuf.errors import Invalid
from replaybuf.wire.drop_reasons import broken_payload

MAGIC = b"RBSPILL1"
"""First bytes of a stub; a frame begins with other ones."""
DURABLE_SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "az")
"""Stores that keep what they acknowledged: `memory:` and caches do not, and plain HTTP cannot be written."""
FILES_PER_FOLDER = 1_000
"""Groups whose frames share a subfolder: file systems list and sync small folders faster."""

_FOLDER = r"[a-z0-9][a-z0-9._-]{0,62}-[0-9a-f]{16}"
_PATH = re.compile(_FOLDER + r"/(0|[1-9][0-9]*)/([1-9][0-9]*)-[0-9a-f]{16}")
_UNFINISHED = re.compile(_PATH.pattern + r"(\.[0-9a-f]{8})?\.new")
FOLDER = re.compile(_FOLDER)
"""Name of a run's own folder: the run, and a random part, because two services may share one `spill.url`."""


def check_spill_url(url: str) -> str:
    """Return the URL of a spill folder. Raises `Invalid` for stores that are not durable, and for incomplete URLs."""
    parts, bound = urlsplit(url), ", ".join(DURABLE_SCHEMES)
    if parts.scheme not in DURABLE_SCHEMES or "::" in url:
        why = f"its scheme must be one of {bound}"
    elif parts.username or parts.password or parts.query or parts.fragment:
        why = "it must have no user, password, query or fragment: the store's own settings hold them"
    elif ".." in parts.path.split("/") or not url.isprintable():
        why = "it must be a plain path without '..'"
    elif parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        why = "a local folder is written file:///FOLDER"
    elif parts.scheme != "file" and not parts.netloc:
        why = f"a bucket is written {parts.scheme}://BUCKET/FOLDER"
    else:
        return url
    raise Invalid(f"spill.url is {url!r}; {why}", name="spill.url", value=url, bound=bound)


def path_of(folder: str, number: int, payload_key: str) -> str:
    """Return the path below `spill.url` of a group's frame or late column. The random payload key makes it unique."""
    digest = hashlib.blake2b(payload_key.encode(), digest_size=8).hexdigest()
    return f"{folder}/{number // FILES_PER_FOLDER}/{number}-{digest}"


def number_in(path: str) -> int | None:
    """Return the number of the group of a file, also of an unfinished one; None if no spill wrote such a path."""
    match = _PATH.fullmatch(path) or _UNFINISHED.fullmatch(path)
    return int(match[2]) if match else None


def is_folder_of(run: str, folder: str) -> bool:
    """Return whether a run may own a folder of this name."""
    return FOLDER.fullmatch(folder) is not None and folder.rpartition("-")[0] == run


def is_unfinished(path: str) -> bool:
    """Return whether a crash left this file before it was complete."""
    return _UNFINISHED.fullmatch(path) is not None


def encode_stub(path: str) -> bytes:
    """Return what stays in Redis of a spilled frame."""
    return MAGIC + path.encode()


def is_stub(value: bytes) -> bool:
    """Return whether a payload is the stub of a spilled frame."""
    return value.startswith(MAGIC)


def stub_path(run: str, value: bytes | None) -> str | None:
    """Return the path in a stub of a run; None for a frame. Raises `BrokenFrame` for a path that its spill never wrote.

    Only a direct writer can make one: it must not read files of other runs, or other files of this machine.
    """
    if value is None or not is_stub(value):
        return None
    path = value[len(MAGIC) :].decode(errors="replace")
    if _PATH.fullmatch(path) is None or not is_folder_of(run, path.partition("/")[0]):
        raise broken_payload("broken_frame", f"the stub of a spilled frame names {path[:100]!r}")
    return path
