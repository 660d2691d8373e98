"""Hash of the code that a seed belongs to, and the first of the seeds that are new with each change of the product."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import replaybuf
import replaybuf_strategies

PRODUCT = (Path(replaybuf.__file__).parent, Path(replaybuf_strategies.__file__).parent)
FOLDERS = (*PRODUCT, Path(__file__).parent)
FIRST_BASE, BASES, SEEDS_PER_BASE = 1_000_000, 1_000_000, 1_000


class OtherRelease(ValueError):
    """A seed is replayed with other code than it was printed by."""


@functools.cache
def release() -> str:
    """Return the hash of all code that a schedule runs."""
    code = hashlib.blake2b(digest_size=4)
    for source in _read_sources(FOLDERS):
        code.update(source)
    return code.hexdigest()


def check_release(seed: int, wanted: str | None) -> None:
    """Raise `OtherRelease` unless a seed was printed by this code; None checks nothing."""
    if wanted not in (None, release()):
        raise OtherRelease(
            f"seed {seed} is of release {wanted}, and this is {release()}: it is another schedule here. Check out the "
            "commit that printed it, or leave out --release to run whatever the seed is here"
        )


def base_of_product(folders: Sequence[Path] = PRODUCT) -> int:
    """Return the first seed of a product's own `SEEDS_PER_BASE` seeds. It depends on the contents of its sources alone.

    A random base would fail for a change that is not at fault, and two runs of one commit would have two results.
    """
    return base_of(_read_sources(folders))


def base_of(sources: Iterable[bytes]) -> int:
    """Return the first seed for these sources, in any order."""
    code = hashlib.blake2b(digest_size=8)
    for digest in sorted(hashlib.blake2b(source).digest() for source in sources):
        code.update(digest)
    return FIRST_BASE + int.from_bytes(code.digest(), "big") % BASES * SEEDS_PER_BASE


def _read_sources(folders: Sequence[Path]) -> list[bytes]:
    """Read the Python and Lua files of folders, in the order of their paths."""
    paths = sorted(path for folder in folders for kind in ("*.py", "*.lua") for path in folder.rglob(kind))
    return [path.read_bytes() for path in paths]
