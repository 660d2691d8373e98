"""The checks of adapters pass a correct history and find each kind of fault in one that is wrong in a single place."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from replaybuf.wire.ledger import AdapterStep, AnyRecord, AttachRecord, BatchEntry, BatchRecord, RewindRecord
from tests.builders import config_record
from tests.chaos.adapter_checks import adapters_take_turns, rows_hold_one_adapter
from tests.chaos.history import AnyEvent, BatchAsked, Body, GroupSeen, LedgerSeen, Rollout
from tests.chaos.run_history import RunHistory

RUN = "adapters"
CONFIG = config_record(
    strategy={"name": "one-step-off-policy", "options": {"max_staleness": 2}},
    adapters={"code": {"groups_per_batch": 1}, "math": {"groups_per_batch": 2}},
)


def held(number: int, adapter: str) -> BatchEntry:
    """A group of a batch."""
    return BatchEntry(number, f"{adapter}/p{number}", "", number, adapter, 0, 0, 1, 20, f"key{number}")


def batch(step: int, turn: str, parts: dict[str, tuple[int, int, bool]], *groups: BatchEntry) -> BatchRecord:
    """The batch of a step; `parts`: own step, groups and whether it completes that, by adapter; a version per step."""
    return BatchRecord(
        step=step,
        generation=0,
        batch_id=f"0-{step}",
        digest="",
        version=0,
        strategy="one-step-off-policy",
        options={},
        seed=[0, 0, step],
        tokens=20 * len(groups),
        rollouts=2 * len(groups),
        groups=list(groups),
        adapters={name: AdapterStep(own, own, groups, done) for name, (own, groups, done) in parts.items()},
        turn=turn,
    )


LEDGER: list[AnyRecord] = [
    CONFIG,
    AttachRecord(epoch=1, step=0, dp_world_size=1, seq_len=64, pad_to_multiple_of=1),
    batch(0, "math", {"code": (0, 1, True), "math": (0, 1, False)}, held(1, "code"), held(2, "math")),
    batch(1, "code", {"math": (0, 1, True)}, held(3, "math")),
    RewindRecord(step=1, generation=1, on_resume="resample", version=0, until=4, versions={"code": 1, "math": 0}),
    batch(1, "math", {"math": (0, 1, True), "code": (1, 1, True)}, held(3, "math"), held(4, "code")),
]


GROUPS = [(1, "code"), (2, "math"), (3, "math"), (4, "code")]


def asked() -> BatchAsked:
    """The batch of step 0 as one rank got it."""
    return BatchAsked(at_s=1.0, sent_s=0.9, run=RUN, epoch=1, step=0, rank=0, world=1, body=BODY)


BODY = Body(
    sha256="",
    generation=0,
    batch_id="0-0",
    digest="",
    version=0,
    batch_groups=2,
    rollouts=[Rollout(name, k, 0, 0, 1, 0, row) for row, name in enumerate(("code/p1", "math/p2")) for k in (0, 1)],
    adapters=["code", "math"],
    completed={"code": 0},
)


def history() -> list[AnyEvent]:
    """Two steps of two adapters, the second voided and made anew with the same turn."""
    listed = [
        GroupSeen(
            at_s=2.0,
            run=RUN,
            server="",
            number=number,
            group_id=f"{name}/p{number}",
            prompt_index=number,
            policy_version=0,
            adapter=name,
            state="in_batches",
        )
        for number, name in GROUPS
    ]
    return [asked(), *listed, *(seen_at(entry, record) for entry, record in enumerate(LEDGER, 1))]


def seen_at(entry: int, record: AnyRecord) -> LedgerSeen:
    """A ledger entry as a server gave it."""
    return LedgerSeen(at_s=3.0, run=RUN, server="", entry=entry, record=msgspec.to_builtins(record))


def complaints(events: list[AnyEvent]) -> list[str]:
    """What both checks say."""
    run = RunHistory(events)
    return [*rows_hold_one_adapter(run), *adapters_take_turns(run)]


def test_a_correct_history_of_adapters_passes() -> None:
    """With a turn and a progress that a rewind gave back."""
    assert complaints(history()) == []


def rewritten(entry: int, **fields: object) -> Callable[[list[AnyEvent]], None]:
    """Change a ledger entry."""

    def change(events: list[AnyEvent]) -> None:
        place = next(n for n, event in enumerate(events) if isinstance(event, LedgerSeen) and event.entry == entry)
        events[place] = seen_at(entry, msgspec.structs.replace(LEDGER[entry - 1], **fields))

    return change


def served_as(**fields: object) -> Callable[[list[AnyEvent]], None]:
    """Change the body."""

    def change(events: list[AnyEvent]) -> None:
        events[0] = msgspec.structs.replace(events[0], body=msgspec.structs.replace(BODY, **fields))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (served_as(adapters=["code", "code"]), "is for 'code' and holds group math/p2"),
        (served_as(completed={}), "served as completing {}"),
        (rewritten(6, groups=[held(4, "code"), held(3, "math")]), "serves ['code', 'math']; the turns were"),
        (rewritten(4, turn=""), "the turn behind step 1 is ''"),
        (rewritten(3, adapters={"code": AdapterStep(0, 0, 1, True)}), "by the batches before it"),
        (rewritten(6, adapters={"math": AdapterStep(1, 0, 1, False), "code": AdapterStep(1, 1, 1, True)}), "has the p"),
    ],
    ids=["mixed row", "completion", "order", "no turn", "part missing", "progress"],
)
def test_a_fault_of_adapters_is_found(change: Callable[[list[AnyEvent]], None], said: str) -> None:
    """Each in its own words."""
    events = history()
    change(events)
    assert any(said in complaint for complaint in complaints(events)), complaints(events)


def test_an_adapter_that_is_stored_and_never_trained_is_found() -> None:
    """Enough of its groups are there for several of its own batches."""
    events = history()
    spare = [event for event in events if isinstance(event, GroupSeen) and event.number == 2]
    events += [msgspec.structs.replace(spare[0], number=number, group_id=f"math/p{number}") for number in range(5, 12)]
    rewritten(4, adapters={}, groups=[])(events)
    rewritten(6, adapters={}, groups=[])(events)
    assert any("completed none of its batches of 2" in complaint for complaint in complaints(events))
