"""Releases of frameworks that an adapter was tested with."""

from __future__ import annotations

import warnings
from importlib.metadata import version


def warn_if_untested(adapter: str, package: str, first: str, below: str) -> None:
    """Warn if the installed release of `package` is outside `first` <= release < `below`, such as 1.16 and 1.17."""
    found = version(package)
    if not _numbers(first) <= _numbers(found) < _numbers(below):
        warnings.warn(
            f"{package} is {found}; {adapter} is tested with {first} up to but not {below}: run its tests, or install "
            "a tested release",
            stacklevel=3,
        )


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers at the start of a release: 1.16.0rc1 -> 1, 16."""
    parts = release.split(".")
    known = next((at for at, part in enumerate(parts) if not part.isdecimal()), len(parts))
    return tuple(int(part) for part in parts[:known])
