"""The judge of a schedule: the checker of chaos, and what only a simulated world can be asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replaybuf.wire.ledger import BatchRecord
from tests.chaos.checker import check
from tests.chaos.fault_checks import issued_too_early
from tests.chaos.history import AnyEvent
from tests.chaos.ledger_walk import walk
from tests.chaos.run_history import RunHistory
from tests.simulation.mix import EXACT, Mix


def judge(history: Sequence[AnyEvent], mix: Mix, *, jumped: bool) -> list[str]:
    """Return violations of the guarantees. `jumped`: the clock of a server was changed."""
    run = RunHistory([event for event in history if event.run])
    # The next leader takes a deadline from the wall clock of the last one; where they differ it is an estimate.
    estimated = set(issued_too_early(run)) if jumped else set()
    violations = [f"{found.guarantee}: {found.what}" for found in check(history) if found.what not in estimated]
    # A group that lacks a late column leaves its slot until it has it.
    in_order = mix.strategy == EXACT and not mix.staged
    return violations + (list(_slots_out_of_order(run)) if in_order else [])


def _slots_out_of_order(run: RunHistory) -> Iterator[str]:
    """Find batches of exact slots with a prompt before one that an earlier batch has."""
    for entry, record, before in walk(run.ledger):
        if not isinstance(record, BatchRecord):
            continue
        held = [one.groups for step, one in before.standing.items() if step < record.step]
        earlier = max((group.prompt_index or 0 for groups in held for group in groups), default=-1)
        indexes = [group.prompt_index for group in record.groups if group.prompt_index is not None]
        if min(indexes, default=earlier + 1) <= earlier:
            yield f"slots: entry {entry}, step {record.step} has prompts {indexes} after prompt {earlier}"
