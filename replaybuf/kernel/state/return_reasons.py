"""Reasons with which producers return tickets: which are failures, and which do not count as a failed attempt."""

from __future__ import annotations

_SERVERS_AWAY = (
    *("engine_away", "engine_stale", "ref_engine_away", "teacher_engine_away"),
    *("old_engine_away", "old_engine_stale"),
)
_NOT_WANTED = frozenset({"shutdown", "superseded", "lost_lineage", "run_paused", "run_finished"})
FORGIVEN_REASONS = _NOT_WANTED | {*_SERVERS_AWAY}
"""Reasons of a return that do not count as a failed attempt, because the prompt is not the cause.

`engine_timeout` and `engine_lost` count: else a prompt that is too slow or crashes engines would come again for ever.
"""


def is_forgiven(reason: str) -> bool:
    """Return whether a return for `reason` does not count as a failed attempt; text after the first `:` is ignored."""
    return _word(reason) in FORGIVEN_REASONS


def _word(reason: str) -> str:
    return reason.partition(":")[0].strip()


NOBODY_FAILED = _NOT_WANTED | {""}
"""Reasons of a return without any failure: the group is not wanted any more, or its producer ends."""


def is_failure(reason: str) -> bool:
    """Return whether a return for `reason` is a fault of the producer, its engines or its prompt."""
    return _word(reason) not in NOBODY_FAILED
