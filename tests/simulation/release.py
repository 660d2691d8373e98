"""Name of the code that a seed belongs to: another service, strategy or load makes another schedule of it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import replaybuf
import replaybuf_strategies

FOLDERS = (Path(replaybuf.__file__).parent, Path(replaybuf_strategies.__file__).parent, Path(__file__).parent)


class OtherRelease(ValueError):
    """A seed is replayed with other code than it was printed by."""


@functools.cache
def release() -> str:
    """Return the hash of all code that a schedule runs."""
    code = hashlib.blake2b(digest_size=4)
    for path in sorted(path for folder in FOLDERS for kind in ("*.py", "*.lua") for path in folder.rglob(kind)):
        code.update(path.read_bytes())
    return code.hexdigest()


def check_release(seed: int, wanted: str | None) -> None:
    """Raise `OtherRelease` unless a seed was printed by this code; None checks nothing."""
    if wanted not in (None, release()):
        raise OtherRelease(
            f"seed {seed} is of release {wanted}, and this is {release()}: it is another schedule here. Check out the "
            "commit that printed it, or leave out --release to run whatever the seed is here"
        )
