"""What an adapter checks before training starts: the release of its framework, and settings of the run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version

from replaybuf.errors import Invalid


def warn_if_untested(adapter: str, package: str, first: str, below: str) -> None:
    """Warn if the installed release of `package` is outside `first` <= release < `below`, such as 1.16 and 1.17."""
    found = version(package)
    if not _numbers(first) <= _numbers(found) < _numbers(below):
        warnings.warn(
            f"{package} is {found}; {adapter} is tested with {first} up to but not {below}: run its tests, or install "
            "a tested release",
            stacklevel=3,
        )


def check_run_settings(run: str, needed: Mapping[str, tuple[object, object, str]]) -> None:
    """Raise `Invalid` for the first setting of a run that does not fit: name -> (its value, the needed one, why)."""
    for name, (value, wanted, why) in needed.items():
        if value != wanted:
            raise misfit(f"run {run}: {name}", value, f"{wanted} ({why})")


def misfit(name: str, value: object, bound: str) -> Invalid:
    """Return the error of a setting that does not fit."""
    return Invalid(f"{name} is {value}; needed: {bound}", name=name, value=str(value), bound=bound)


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers at the start of a release: 1.16.0rc1 -> 1, 16."""
    parts = release.split(".")
    known = next((at for at, part in enumerate(parts) if not part.isdecimal()), len(parts))
    return tuple(int(part) for part in parts[:known])
