"""Check of a recorded history against the guarantees. Pure: events in, violations out.

One function per guarantee; `GUARANTEES` is their table. The checks read three things: answers to clients
(`RunHistory.calls` of each kind), the ledger (`walk`), and the state at the end. They have their own fold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tests.chaos.fault_checks import lost_writes_are_noticed, nobody_pays_for_others
from tests.chaos.flow_checks import every_prompt_and_step_once, no_silent_wait
from tests.chaos.group_checks import (
    append_is_idempotent,
    groups_stay_whole,
    nothing_is_lost_in_between,
    staleness_is_bounded,
    stored_means_stored,
    use_is_bounded,
)
from tests.chaos.history import AnyEvent
from tests.chaos.run_history import RunHistory
from tests.chaos.trainer_checks import bytes_stay_the_same, rewind_restores, the_old_are_fenced


class Violation(NamedTuple):
    """One guarantee of design.md section 3 that did not hold, and how."""

    guarantee: int
    run: str
    what: str


GUARANTEES: dict[int, Callable[[RunHistory], Iterator[str]]] = {
    1: stored_means_stored,
    2: append_is_idempotent,
    3: nothing_is_lost_in_between,
    4: use_is_bounded,
    5: staleness_is_bounded,
    6: groups_stay_whole,
    7: bytes_stay_the_same,
    8: the_old_are_fenced,
    9: every_prompt_and_step_once,
    10: rewind_restores,
    11: no_silent_wait,
    13: lost_writes_are_noticed,
    14: nobody_pays_for_others,
}
"""By number. A configuration that is refused at its start (12) has no history."""


def check(history: Sequence[AnyEvent]) -> list[Violation]:
    """Check every guarantee for every run of a history."""
    violations = []
    faults = [event for event in history if not event.run]
    for run in sorted({event.run for event in history if event.run}):
        events = RunHistory([event for event in history if event.run == run], faults)
        for guarantee, check_run in GUARANTEES.items():
            violations += [Violation(guarantee, run, what) for what in check_run(events)]
    return violations
