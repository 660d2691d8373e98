"""Checks of what leaves a run beside its batches: the pages of a cursor, and copies that are restored."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.history import OK, CursorMoved
from tests.chaos.run_history import RunHistory


def cursors_read_each_group_once(run: RunHistory) -> Iterator[str]:
    """Find pages of a cursor that do not follow the groups that are done, or hold other groups than were stored.

    A page comes again until a move is answered. A move without an answer may have taken effect.
    """
    done = {0}
    for event in sorted(run.cursor, key=lambda event: event.sent_s):
        if event.outcome != OK:
            continue
        if isinstance(event, CursorMoved):
            done = {event.number}
            continue
        for group in event.wrong:
            yield f"the cursor returned group {group}; done: {sorted(done)}, page: {event.numbers}"
        if event.numbers:
            first, last = event.numbers[0], event.numbers[-1]
            if event.numbers != list(range(first, last + 1)) and not event.missed:
                yield f"the cursor returned groups {event.numbers}, in no order or with gaps"
            if not any(first - 1 - event.missed <= number < first for number in done):
                yield f"the cursor returned group {first} after group {sorted(done)} was done"
            done.add(last)
        elif event.last:
            for seen in run.states[-1:]:
                if seen.state["groups"]["stored"] not in done:
                    yield f"the cursor ended at group {sorted(done)} of {seen.state['groups']['stored']}"


def restores_bring_all_back(run: RunHistory) -> Iterator[str]:
    """Find runs that were not what they were before their deletion."""
    for restored in run.restored:
        for difference in restored.differences:
            yield f"{restored.side} was restored with a difference: {difference}"
