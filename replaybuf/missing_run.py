"""The error of a run that does not exist: it names those that do, and each reader gets the way out in its own words."""

from __future__ import annotations

from collections.abc import Sequence

from replaybuf.errors import NotFound, ReplaybufError

MOST_NAMED = 10
"""Names of other runs in the error of a missing one."""


def no_run(run: str, others: Sequence[str], way_out: str) -> NotFound:
    """Return the error of a run that does not exist; `others`: runs that do, `way_out`: how the caller makes one."""
    shown = [*others[:MOST_NAMED], "..."] if len(others) > MOST_NAMED else others
    detail = f"run {run!r} does not exist; runs here: {', '.join(shown) or 'none'}; {way_out}"
    return NotFound(detail, name="run", value=run, bound=list(others[: MOST_NAMED + 1]))


def is_missing_run(error: ReplaybufError) -> bool:
    """Return whether an error is one that `no_run` made, here or on the other side of HTTP."""
    return isinstance(error, NotFound) and error.name == "run" and isinstance(error.bound, list)


def in_words_of(error: ReplaybufError, way_out: str) -> ReplaybufError:
    """Return the error in the words of its reader: for a run that does not exist `way_out` is a call or a command."""
    return no_run(str(error.value), error.bound, way_out) if is_missing_run(error) else error
