"""Checks of a run with adapters: one adapter per row, turns and own steps that agree with the ledger.

Both find nothing in a run without adapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from replaybuf.wire.ledger import BatchRecord
from tests.chaos.ledger_walk import WalkState, final_state, walk
from tests.chaos.run_history import RunHistory

STARVED_BATCHES = 4
"""An adapter with stored groups for this many own batches must have trained one of them."""


def rows_hold_one_adapter(run: RunHistory) -> Iterator[str]:
    """A micro-batch holds rollouts of one adapter, the one that the body names."""
    adapters = {group.group_id: group.adapter for group in run.stored_groups().values()}
    for asked in run.bodies:
        for rollout in asked.body.rollouts if asked.body else []:
            named = asked.body.adapters[rollout.micro_batch] if asked.body and asked.body.adapters else ""
            if named != adapters.get(rollout.group_id, named):
                where = f"step {asked.step}, rank {asked.rank}, micro-batch {rollout.micro_batch}"
                yield f"{where} is for {named!r} and holds group {rollout.group_id} of {adapters[rollout.group_id]!r}"


def adapters_take_turns(run: RunHistory) -> Iterator[str]:
    """Adapters share a batch in the order of turns, no kill loses a turn, each has its own steps, none starves."""
    for entry, record, before in walk(run.ledger):
        if not isinstance(record, BatchRecord) or not before.own:
            continue
        recorded = {
            name: (part.step, part.version, part.groups, part.completed) for name, part in record.adapters.items()
        }
        if recorded != (parts := dict(_parts(record, before))):
            yield f"entry {entry}: step {record.step} has the parts {recorded}; by the batches before it {parts}"
        order = _order(list(before.own), before.turn(record.step))
        served = list(dict.fromkeys(group.adapter for group in record.groups))
        if served != [name for name in order if name in served]:
            yield f"entry {entry}: step {record.step} serves {served}; the turns were {order}"
        if record.turn not in before.own:
            yield f"entry {entry}: the turn behind step {record.step} is {record.turn!r}"
    for asked in run.bodies:
        whole = run.batches.get(asked.body.batch_id) if asked.body else None
        done = {name: part.step for name, part in whole.adapters.items() if part.completed} if whole else {}
        if asked.body and whole and asked.body.completed != done:
            yield f"step {asked.step} was served as completing {asked.body.completed}; its record completes {done}"
    after = final_state(run.ledger)
    stored = Counter(group.adapter for group in run.stored_groups().values())
    for name, (size, _) in after.own.items():
        if stored[name] >= STARVED_BATCHES * size and not after.own_step(after.next_step, name):
            yield f"adapter {name} has {stored[name]} groups stored and completed none of its batches of {size}"


def _parts(record: BatchRecord, before: WalkState) -> Iterator[tuple[str, tuple[int, int, int, bool]]]:
    """Compute the part of each adapter in a batch from the batches before it, in the form of `AdapterStep`."""
    for name, groups in Counter(group.adapter for group in record.groups).items():
        earlier = before.groups_before(record.step, name)
        step = before.own_step(record.step, name)
        ends = (step + 1) * before.own[name][0]
        yield name, (step, before.version(record.step, name), groups, earlier + groups == ends)


def _order(names: list[str], turn: str) -> list[str]:
    at = names.index(turn) if turn in names else 0
    return names[at:] + names[:at]
