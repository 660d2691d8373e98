"""The checker passes a correct history and finds each guarantee that a single wrong event breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from replaybuf.wire.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    BatchEntry,
    BatchRecord,
    CheckpointRecord,
    FailedPromptRecord,
    PolicyRecord,
    RewindRecord,
)
from tests.builders import config_record
from tests.chaos.checker import GUARANTEES, check
from tests.chaos.content import checksum, tokens_of
from tests.chaos.fault_checks import lost_writes_are_noticed
from tests.chaos.history import (
    AnyEvent,
    Attached,
    Attacked,
    BatchAsked,
    Body,
    Drained,
    Faulted,
    Folded,
    GroupSeen,
    GroupSent,
    Healed,
    LedgerSeen,
    OlderRedis,
    PayloadRead,
    RanksWaited,
    Rollout,
    StateSeen,
    TicketReturned,
    TicketsTaken,
    TrainerWrote,
)
from tests.chaos.run_history import RunHistory

RUN = "r"
HERE, THERE = "http://a", "http://b"
History = list[AnyEvent]
WAITING = {
    "reason": "no_groups",
    "blocked_on": "producers",
    "have": {"groups": 0, "tokens": 0},
    "need": {"groups": 2, "tokens": 0},
}
COUNTS = {"stored": 4, "live": 0, "in_batches": 2, "retired": 2, "evicted": {}, "dead_lettered": 0}
STATE = {
    "state": "running",
    "step": 2,
    "epoch": 2,
    "generation": 1,
    "published_version": 2,
    "groups": COUNTS | {"rejected": {}},
    "tokens": {"live": 0},
    "tickets": {"issued": 5, "out": 0, "expired": 1, "returned": 0, "failed": 1},
    "staleness": {"0": 2, "1": 2},
    "waiting": WAITING,
}


# ---------------------------------------------------------------------- a correct history


def held(number: int, prompt_index: int, staleness: int) -> BatchEntry:
    """One group of a batch, sampled by version 0."""
    group_id = f"p{prompt_index}"
    return BatchEntry(number, group_id, f"chaos/{group_id}", prompt_index, "", 0, staleness, 1, 20, f"key{number}")


def batch(step: int, *groups: BatchEntry) -> BatchRecord:
    """The batch of a step, made in generation 0."""
    return BatchRecord(
        step=step,
        generation=0,
        batch_id=f"0-{step}",
        digest=f"d{step}",
        version=step,
        strategy="one-step-off-policy",
        options={},
        seed=[0, 0, step],
        tokens=40,
        rollouts=4,
        groups=list(groups),
    )


def attach(epoch: int, step: int) -> AttachRecord:
    """A trainer with one rank."""
    return AttachRecord(epoch=epoch, step=step, dp_world_size=1, seq_len=64, pad_to_multiple_of=1)


def publish(version: int, epoch: int) -> PolicyRecord:
    """A version."""
    return PolicyRecord(version=version, weights_uri=None, adapter="", epoch=epoch)


CONFIG = config_record(strategy={"name": "one-step-off-policy", "options": {"max_staleness": 1}})
LEDGER: list[AnyRecord] = [
    CONFIG,
    attach(1, 0),
    batch(0, held(1, 0, 0), held(2, 1, 0)),
    AckRecord(step=0, epoch=1),
    publish(1, 1),
    CheckpointRecord(step=1, keep=1),
    batch(1, held(3, 2, 1), held(4, 3, 1)),
    AckRecord(step=1, epoch=1),
    FailedPromptRecord(adapter="", prompt_index=4, outcome="failed", attempts=3, reason="expired"),
    attach(2, 1),
    RewindRecord(step=1, generation=1, on_resume="redeliver", version=1, until=4),
    AckRecord(step=1, epoch=2),
    publish(2, 2),
]


def seen(entry: int, record: AnyRecord, server: str = HERE) -> LedgerSeen:
    """One entry as the observer writes it down."""
    return LedgerSeen(at_s=30.0 + entry, run=RUN, server=server, entry=entry, record=msgspec.to_builtins(record))


def asked(step: int, epoch: int, at_s: float, server: str = HERE) -> BatchAsked:
    """A whole batch that was served to one rank, from the ledger's record of the step."""
    record = next(record for record in LEDGER if isinstance(record, BatchRecord) and record.step == step)
    rollouts = [
        Rollout(
            group.group_id,
            number,
            0,
            group.staleness,
            1,
            checksum(tokens_of(group.group_id, group.prompt_id, number)),
        )
        for group in record.groups
        for number in range(2)
    ]
    body = Body(
        sha256=f"sha{step}",
        generation=0,
        batch_id=record.batch_id,
        digest=record.digest,
        version=step,
        batch_groups=2,
        rollouts=rollouts,
    )
    return BatchAsked(
        at_s=at_s, sent_s=at_s - 0.1, run=RUN, server=server, epoch=epoch, step=step, rank=0, world=1, body=body
    )


def answered(at_s: float, **fields: Any) -> dict[str, Any]:
    """The fields of every call."""
    return {"at_s": at_s, "sent_s": at_s - 0.1, "run": RUN, "server": HERE} | fields


def sent(number: int, at_s: float, outcome: str = "stored") -> GroupSent:
    """The group of a prompt."""
    return GroupSent(**answered(at_s, outcome=outcome), group_id=f"p{number}", prompt_index=number, policy_version=0)


def wrote(kind: str, value: int, epoch: int, at_s: float, outcome: str = "ok") -> TrainerWrote:
    """A write of a trainer."""
    return TrainerWrote(**answered(at_s, outcome=outcome), kind=kind, value=value, epoch=epoch)


def correct() -> History:
    """Two steps; the trainer is killed after the second and resumes at its checkpoint; one prompt fails."""
    tickets = [(f"t0-{number}-1", number, 1) for number in range(5)]
    groups = [
        GroupSeen(
            at_s=50.0,
            run=RUN,
            server=HERE,
            number=number + 1,
            group_id=f"p{number}",
            prompt_index=number,
            policy_version=0,
            state="retired" if number < 2 else "in_batches",
            last=True,
        )
        for number in range(4)
    ]
    payloads = [
        PayloadRead(
            at_s=51.0,
            run=RUN,
            group_id=f"p{number}",
            prompt_id=f"chaos/p{number}",
            rollouts=[checksum(tokens_of(f"p{number}", f"chaos/p{number}", rollout)) for rollout in range(2)],
        )
        for number in (2, 3)
    ]
    return [
        Attached(**answered(1.0), resume_step=0, on_resume="redeliver", world=1, epoch=1),
        TicketsTaken(**answered(2.0), tickets=tickets),
        *(sent(number, 3.0) for number in range(4)),
        sent(1, 3.5, "duplicate"),
        TicketsTaken(**answered(3.6), waiting=WAITING),
        BatchAsked(**answered(3.7), epoch=1, step=0, rank=0, world=1, waiting=WAITING),
        asked(0, 1, 4.0),
        wrote("ack", 0, 1, 5.0),
        wrote("publish", 1, 1, 6.0),
        wrote("checkpoint", 1, 1, 7.0),
        asked(1, 1, 8.0),
        wrote("ack", 1, 1, 9.0),
        Attached(**answered(20.0), resume_step=1, on_resume="redeliver", world=1, epoch=2, step=1, generation=1),
        wrote("ack", 2, 1, 20.5, "fenced"),
        asked(1, 2, 21.0, THERE),
        wrote("ack", 1, 2, 22.0),
        wrote("publish", 2, 2, 23.0),
        *(seen(entry, record) for entry, record in enumerate(LEDGER, 1)),
        *(seen(entry, record, THERE) for entry, record in enumerate(LEDGER, 1)),
        *groups,
        *payloads,
        Drained(at_s=52.0, run=RUN, drained=True),
        StateSeen(**answered(53.0), state=STATE, moment="before"),
        StateSeen(**answered(54.0), state=STATE, moment="after"),
        Folded(at_s=55.0, run=RUN, groups=COUNTS),
    ]


def test_a_correct_history_passes() -> None:
    """Also one with a kill, a rewind, a duplicate, a failed prompt and a fenced zombie."""
    assert check(correct()) == []


def test_a_group_may_be_used_again_where_its_strategy_says_so() -> None:
    """With the same configuration and history as the faults below, but for the rest and the mix."""
    history = correct()
    rewrite(history, 1, replayed(mix={"a": 0.5, "b": 0.3, "c": 0.2}))
    used_again(history)
    assert 4 not in {violation.guarantee for violation in check(history)}


def test_a_group_whose_history_is_trimmed_is_known_by_being_a_duplicate() -> None:
    """It is listed no more, and nobody may have seen it before. The group that was sent twice had another id."""
    history = [event for event in correct() if not (isinstance(event, GroupSeen) and event.number == 1)]
    history.append(msgspec.structs.replace(sent(0, 8.0, "duplicate"), group_id="producer-0"))
    history.sort(key=lambda event: event.at_s)
    rewrite(history, 3, batch(0, held(2, 1, 0)))
    reserve(history, 1, rollouts=body_of(history, 1).rollouts[2:])
    assert {violation.guarantee for violation in check(history)} == {1, 9}
    history.append(sent(0, 52.5, "duplicate"))
    assert check(sorted(history, key=lambda event: event.at_s)) == []


# ---------------------------------------------------------------------- what can be wrong with it

Fault = Callable[[History], None]
FAULTS: list[tuple[int, str, Fault]] = []


def fault(guarantee: int) -> Callable[[Fault], Fault]:
    """List a change that breaks a guarantee in the base history."""

    def listed(change: Fault) -> Fault:
        FAULTS.append((guarantee, change.__name__.replace("_", " "), change))
        return change

    return listed


def replace(history: History, kind: type[AnyEvent], number: int, **fields: Any) -> None:
    """Change fields of event `number` of a kind; negative numbers count from the end."""
    place = [place for place, event in enumerate(history) if isinstance(event, kind)][number]
    history[place] = msgspec.structs.replace(history[place], **fields)


def rewrite(history: History, entry: int, record: AnyRecord | None) -> None:
    """Change what the ledger says at `entry`, for every server; None takes it away."""
    history[:] = [event for event in history if not (isinstance(event, LedgerSeen) and event.entry == entry)]
    if record is not None:
        history += [seen(entry, record), seen(entry, record, THERE)]


def changed(number: int, **fields: Any) -> AnyRecord:
    """The record of an entry with other fields."""
    return msgspec.structs.replace(LEDGER[number - 1], **fields)


def retold(history: History, number: int, **groups: Any) -> None:
    """Change the counts of observed state `number`."""
    replace(history, StateSeen, number, state=STATE | {"groups": COUNTS | {"rejected": {}} | groups})


def body_of(history: History, number: int) -> Body:
    """What fetch `number` brought (0: a wait, 1: step 0, 2: step 1, 3: step 1 again)."""
    body = [event for event in history if isinstance(event, BatchAsked)][number].body
    assert body is not None
    return body


def reserve(history: History, number: int, **fields: Any) -> None:
    """Change what body `number` held."""
    replace(history, BatchAsked, number, body=msgspec.structs.replace(body_of(history, number), **fields))


def reserve_rollout(history: History, **fields: Any) -> None:
    """Change the first rollout of step 0 as it was served."""
    first, *others = body_of(history, 1).rollouts
    reserve(history, 1, rollouts=[msgspec.structs.replace(first, **fields), *others])


@fault(1)
def a_stored_group_is_gone(history: History) -> None:
    history.append(sent(9, 10.0))


@fault(1)
def a_duplicate_of_nothing(history: History) -> None:
    history.append(sent(9, 10.0, "duplicate"))


@fault(1)
def an_answered_ack_is_not_in_the_ledger(history: History) -> None:
    history.append(wrote("ack", 2, 2, 25.0))


@fault(1)
def an_answered_attach_is_not_in_the_ledger(history: History) -> None:
    history.append(Attached(**answered(26.0), resume_step=None, on_resume="redeliver", world=1, epoch=3, step=2))


@fault(1)
def an_ack_loses_what_the_learner_sent(history: History) -> None:
    rewrite(history, 4, changed(4, priorities={1: -1.0, 2: 0.0}))


@fault(1)
def the_service_tells_of_lost_data(history: History) -> None:
    history.append(wrote("ack", 2, 2, 25.0, "data-lost"))


@fault(1)
def rollouts_that_a_resume_needs_are_gone(history: History) -> None:
    replace(history, PayloadRead, 0, rollouts=None)


@fault(1)
def a_stored_group_is_not_readable(history: History) -> None:
    for number in (0, 1):
        retold(history, number, in_batches=1, dead_lettered=1)


@fault(1)
def the_count_of_stored_groups_is_short(history: History) -> None:
    for number in (0, 1):
        retold(history, number, stored=3, in_batches=1)


@fault(1)
def a_restart_changes_the_state(history: History) -> None:
    replace(history, StateSeen, 1, state=STATE | {"published_version": 1})


@fault(2)
def a_group_is_stored_twice_by_the_answers(history: History) -> None:
    history.append(sent(1, 10.0))


@fault(2)
def a_group_has_two_numbers(history: History) -> None:
    history.append(msgspec.structs.replace(groups_of(history)[1], number=5))


@fault(2)
def a_duplicate_replaced_the_first(history: History) -> None:
    replace(history, GroupSent, 1, policy_version=1)


@fault(3)
def a_state_loses_a_group(history: History) -> None:
    history.append(StateSeen(**answered(12.0), state=STATE | {"groups": COUNTS | {"in_batches": 1}}))


@fault(3)
def the_streams_fold_to_something_else(history: History) -> None:
    replace(history, Folded, 0, groups=COUNTS | {"in_batches": 3, "retired": 1})


@fault(4)
def a_group_is_used_twice(history: History) -> None:
    rewrite(history, 7, batch(1, held(1, 0, 1), held(4, 3, 1)))


@fault(4)
def a_body_counts_more_uses_than_allowed(history: History) -> None:
    reserve_rollout(history, times_sampled=2)


def replayed(**options: Any) -> AnyRecord:
    """A configuration in which groups may be used twice."""
    strategy = {"name": "replay", "options": {"max_staleness": 1, "max_uses": 2, **options}}
    return config_record(max_uses=2, strategy=strategy)


def used_again(history: History) -> None:
    """Let step 1 use group 1 of step 0 for the second time."""
    rewrite(history, 7, batch(1, msgspec.structs.replace(held(1, 0, 1), times_sampled=2), held(4, 3, 1)))


@fault(4)
def a_group_is_used_while_it_rests(history: History) -> None:
    rewrite(history, 1, replayed(cooldown=1))
    used_again(history)


@fault(4)
def a_group_is_used_that_is_not_in_the_mix(history: History) -> None:
    rewrite(history, 1, replayed(mix={"elsewhere": 1.0}))


@fault(5)
def a_group_is_used_beyond_the_bound(history: History) -> None:
    rewrite(history, 1, changed(1, config=config_record(strategy={"name": "on-policy", "options": {}}).config))


@fault(5)
def a_staleness_is_written_wrongly(history: History) -> None:
    rewrite(history, 7, batch(1, held(3, 2, 0), held(4, 3, 1)))


@fault(5)
def a_body_tells_another_staleness(history: History) -> None:
    reserve(history, 2, version=2)


@fault(5)
def a_group_that_nobody_may_use_stays_live(history: History) -> None:
    replace(history, GroupSeen, 3, state="live")


@fault(6)
def a_rollout_is_missing(history: History) -> None:
    reserve(history, 1, rollouts=body_of(history, 1).rollouts[1:])


@fault(6)
def a_rollout_holds_other_tokens(history: History) -> None:
    reserve_rollout(history, tokens=1)


@fault(6)
def a_foreign_group_is_served(history: History) -> None:
    reserve_rollout(history, group_id="p3")


@fault(6)
def stored_tokens_are_others(history: History) -> None:
    replace(history, PayloadRead, 1, rollouts=[1, 2])


@fault(7)
def the_same_batch_comes_with_other_bytes(history: History) -> None:
    reserve(history, 3, sha256="other")


@fault(7)
def another_batch_is_served_than_the_ledger_tells(history: History) -> None:
    reserve(history, 1, batch_id="0-7")


@fault(7)
def a_redelivered_batch_is_a_new_one(history: History) -> None:
    reserve(history, 3, digest="other", sha256="other", generation=1)


@fault(8)
def an_old_epoch_writes_after_the_new_one_attached(history: History) -> None:
    history.append(wrote("checkpoint", 1, 1, 24.0))


@fault(8)
def the_newest_epoch_is_fenced(history: History) -> None:
    history.append(wrote("ack", 1, 2, 24.0, "fenced"))


@fault(8)
def an_epoch_is_given_twice(history: History) -> None:
    history.append(Attached(**answered(19.0), resume_step=1, on_resume="redeliver", world=1, epoch=2, step=1))


@fault(8)
def an_old_epoch_stands_in_the_ledger(history: History) -> None:
    rewrite(history, 13, changed(13, epoch=1))


@fault(8)
def the_ledger_has_a_gap(history: History) -> None:
    rewrite(history, 9, None)


@fault(8)
def two_servers_tell_two_ledgers(history: History) -> None:
    replace(history, LedgerSeen, -1, record=msgspec.to_builtins(publish(1, 2)))


@fault(8)
def a_step_is_assembled_twice(history: History) -> None:
    history.append(seen(14, msgspec.structs.replace(batch(1), batch_id="0-1-again")))


@fault(9)
def a_prompt_is_skipped(history: History) -> None:
    replace(history, TicketsTaken, 0, tickets=[(f"t0-{number}-1", number, 1) for number in range(6)])


@fault(9)
def a_prompt_is_stored_twice(history: History) -> None:
    history.append(msgspec.structs.replace(groups_of(history)[1], number=5, group_id="own"))


@fault(9)
def a_stored_prompt_is_issued_again(history: History) -> None:
    history.append(TicketsTaken(**answered(10.0), tickets=[("t0-1-2", 1, 2)]))


@fault(9)
def a_ticket_that_was_issued_is_unknown(history: History) -> None:
    event = msgspec.structs.replace(sent(4, 10.0, "rejected"), reason="unknown_ticket")
    history.append(event)


@fault(9)
def a_prompt_is_stored_only_at_the_very_end(history: History) -> None:
    history.append(sent(4, 52.5))


@fault(9)
def a_step_is_acked_twice(history: History) -> None:
    history.append(seen(14, AckRecord(step=1, epoch=2)))


@fault(9)
def a_step_is_skipped(history: History) -> None:
    history.append(seen(14, batch(3)))


@fault(9)
def the_trainer_in_order_is_refused(history: History) -> None:
    history.append(wrote("ack", 2, 2, 24.0, "wrong-step"))


@fault(10)
def a_kept_checkpoint_is_refused(history: History) -> None:
    refused = Attached(**answered(19.0, outcome="wrong-step"), resume_step=1, on_resume="redeliver", world=1)
    history.append(refused)


@fault(10)
def a_needed_batch_is_gone(history: History) -> None:
    history.append(BatchAsked(**answered(24.0, outcome="gone"), epoch=2, step=1, rank=0, world=1))


@fault(10)
def an_attach_resumes_elsewhere(history: History) -> None:
    replace(history, Attached, 1, step=2)


@fault(10)
def a_rewind_goes_below_the_oldest_checkpoint(history: History) -> None:
    rewrite(history, 11, changed(11, step=0, version=0))


@fault(10)
def a_rewind_forgets_the_version(history: History) -> None:
    rewrite(history, 11, changed(11, version=2))


@fault(10)
def a_redelivery_is_resampled(history: History) -> None:
    rewrite(history, 11, changed(11, on_resume="resample"))


@fault(11)
def no_batch_has_no_reason(history: History) -> None:
    replace(history, BatchAsked, 0, waiting=None)


@fault(11)
def no_ticket_has_a_reason_of_its_own(history: History) -> None:
    replace(history, TicketsTaken, 1, waiting=WAITING | {"reason": "because"})


@fault(11)
def a_wait_does_not_say_what_is_missing(history: History) -> None:
    replace(history, StateSeen, 0, state=STATE | {"waiting": WAITING | {"need": None}})


@fault(11)
def nobody_is_waited_for(history: History) -> None:
    replace(history, BatchAsked, 0, waiting=WAITING | {"blocked_on": "somebody"})


@fault(11)
def a_call_meets_a_fault_of_the_service(history: History) -> None:
    history.append(wrote("ack", 2, 2, 24.0, "internal"))


@fault(11)
def the_load_never_comes_to_rest(history: History) -> None:
    replace(history, Drained, 0, drained=False, stood="somewhere")


@fault(9)
def a_ticket_is_issued_again_before_its_time_is_over(history: History) -> None:
    history.append(TicketsTaken(**answered(2.8), tickets=[("t0-4-2", 4, 2)]))


def older(**fields: Any) -> OlderRedis:
    """An older Redis that was served from 10 s to 14 s, reported and left alone."""
    values: dict[str, Any] = {"right_s": 14.0, "kind": "older", "written": [], "silent": []} | fields
    return OlderRedis(at_s=14.0, run=RUN, from_s=10.0, **values)


@fault(1)
def lost_data_is_reported_after_redis_has_it_again(history: History) -> None:
    history += [older(), wrote("ack", 2, 2, 25.0, "data-lost")]


@fault(13)
def an_older_redis_is_written_to(history: History) -> None:
    history.append(older(written=["ledger"]))


@fault(13)
def a_server_does_not_report_an_older_redis(history: History) -> None:
    history.append(older(kind="lagging", silent=[THERE]))


@fault(13)
def an_append_is_answered_while_redis_is_older(history: History) -> None:
    history += [older(), sent(3, 12.0)]


@fault(13)
def tickets_are_issued_while_redis_is_older(history: History) -> None:
    history += [older(), TicketsTaken(**answered(12.0), tickets=[("t0-4-2", 4, 2)])]


@fault(13)
def a_trainer_attaches_while_redis_is_older(history: History) -> None:
    history += [older(), Attached(**answered(12.0), resume_step=1, on_resume="redeliver", world=1, epoch=3)]


@fault(13)
def an_ack_is_answered_while_redis_is_older(history: History) -> None:
    history += [older(), wrote("ack", 2, 2, 12.0)]


def attacked(attack: str, **fields: Any) -> Attacked:
    """An attack of 2 s that was refused while others were served."""
    values: dict[str, Any] = {"status": 431, "sent_bytes": 100_000, "beside": {"200": 9}} | fields
    return Attacked(at_s=12.0, run=RUN, from_s=10.0, server=HERE, attack=attack, **values)


@fault(14)
def a_run_is_paused_without_an_operator(history: History) -> None:
    paused = STATE | {"state": "paused", "paused_reason": "evict did not come to an end within 1 s"}
    history.append(StateSeen(**answered(12.0), state=paused))


@fault(14)
def a_head_is_taken_without_a_bound(history: History) -> None:
    history.append(attacked("endless header", sent_bytes=64 << 20))


@fault(14)
def a_hostile_body_is_a_fault_of_the_service(history: History) -> None:
    history.append(attacked("refused JSON", status=500))


@fault(14)
def a_hostile_body_is_stored(history: History) -> None:
    history.append(attacked("refused JSON", status=200))


@fault(14)
def a_hostile_connection_stays_open(history: History) -> None:
    history.append(attacked("oversized body", status=-1))


@fault(14)
def nobody_is_served_beside_a_hostile_body(history: History) -> None:
    history.append(attacked("half heads", status=408, beside={"none": 3}))


@fault(14)
def waiting_ranks_meet_a_fault_of_the_service(history: History) -> None:
    history.append(RanksWaited(at_s=12.0, run=RUN, from_s=9.0, ranks=512, outcomes={"body": 9, "internal": 1}))


@fault(14)
def no_waiting_rank_is_served(history: History) -> None:
    history.append(RanksWaited(at_s=12.0, run=RUN, from_s=9.0, ranks=512, outcomes={"unavailable": 512}))


def groups_of(history: History) -> list[GroupSeen]:
    """The groups of the last listing."""
    return [event for event in history if isinstance(event, GroupSeen)]


@pytest.mark.parametrize(("guarantee", "change"), [(n, c) for n, _, c in FAULTS], ids=[name for _, name, _ in FAULTS])
def test_a_history_with_one_fault_is_told_under_its_guarantee(guarantee: int, change: Fault) -> None:
    """Whatever else it breaks as well."""
    history = correct()
    change(history)
    assert guarantee in {violation.guarantee for violation in check(sorted(history, key=lambda event: event.at_s))}


def is_correct(*events: AnyEvent) -> bool:
    """Check the correct history with further events."""
    return check(sorted([*correct(), *events], key=lambda event: event.at_s)) == []


def test_an_older_redis_may_be_reported_while_it_serves_and_shortly_after() -> None:
    refused = [wrote("ack", 2, 2, at_s, "data-lost") for at_s in (10.5, 15.0)]
    assert is_correct(older(), *refused)


def test_an_older_redis_may_be_reported_until_the_right_one_has_loaded_its_data() -> None:
    late = wrote("ack", 2, 2, 26.0, "data-lost")
    assert is_correct(older(right_s=20.0), late) and not is_correct(older(), late)


@pytest.mark.parametrize(
    ("kind", "value", "epochs"), [("publish", 1, (2, 2)), ("publish", 0, (2,)), ("checkpoint", 0, (1, 2))]
)
def test_a_repeated_write_may_be_answered_while_redis_is_older(kind: str, value: int, epochs: tuple[int, ...]) -> None:
    """It writes nothing. A kept checkpoint has no epoch, and version 0 is published from the start."""
    calls = [wrote(kind, value, epoch, 12.0 - 4.0 * before) for before, epoch in enumerate(reversed(epochs))]
    assert not list(lost_writes_are_noticed(RunHistory([older(), *calls])))
    assert list(lost_writes_are_noticed(RunHistory([older(), wrote(kind, 1, 2, 12.0), wrote("ack", 1, 1, 8.0)])))


def test_an_attack_on_a_run_whose_data_are_lost_may_be_answered_500() -> None:
    assert is_correct(older(), attacked("refused JSON", status=500))
    assert not is_correct(attacked("refused JSON", status=500))


def test_attacks_may_be_refused_or_cut() -> None:
    """A server under an attack may also answer that it is busy."""
    refused = [attacked("many headers"), attacked("refused JSON", status=413), attacked("refused JSON", status=503)]
    assert is_correct(*refused, attacked("cut body", status=0))


def test_nobody_needs_to_be_served_by_a_server_that_is_killed_meanwhile() -> None:
    killed = Faulted(at_s=9.0, process="serve-1", role="leader", kind="kill", server=HERE)
    waited = RanksWaited(at_s=12.0, run=RUN, from_s=9.5, ranks=512, outcomes={"unavailable": 512})
    assert is_correct(killed, waited, attacked("half heads", status=-1, beside={"none": 3}))


def test_nobody_needs_to_be_served_by_a_server_that_has_not_answered_since_its_restart() -> None:
    """A busy machine takes longer to start a process than it takes most servers to recover."""
    killed = Faulted(at_s=1.0, process="serve-1", role="standby", kind="kill", server=HERE)
    restarted = Healed(at_s=2.0, process="serve-1")
    alone = attacked("half heads", status=0, beside={"none": 1})
    answers = StateSeen(**answered(13.0), state=STATE)
    assert is_correct(killed, restarted, alone, answers)
    early = StateSeen(**answered(4.0), state=STATE)
    assert not is_correct(killed, restarted, alone, answers, early)


@pytest.mark.parametrize("freed", ["returned", "rejected", "a trainer attached", "its producer was killed"])
def test_a_ticket_that_was_given_up_may_be_issued_again_at_once(freed: str) -> None:
    """A killed producer may have given it back without a trace."""
    events: dict[str, AnyEvent] = {
        "returned": TicketReturned(**answered(2.5), ticket="t0-4-1"),
        "rejected": msgspec.structs.replace(sent(4, 2.5, "rejected"), reason="lost_lineage"),
        "a trainer attached": Attached(
            **answered(2.5, outcome="unavailable"), resume_step=0, on_resume="redeliver", world=1
        ),
        "its producer was killed": Faulted(at_s=2.5, process="producer-1", role="producer", kind="kill"),
    }
    history = correct()
    a_ticket_is_issued_again_before_its_time_is_over(history)
    violations = check(sorted([*history, events[freed]], key=lambda event: event.at_s))
    assert not [violation for violation in violations if "followed after" in violation.what]


def test_tickets_of_the_tenth_generation_follow_those_of_the_eighth() -> None:
    """The text of a ticket sorts otherwise."""
    taken = [
        TicketsTaken(**answered(at_s), adapter="", tickets=[(ticket, 99, 1)])
        for ticket, at_s in (("t8-99-1-1", 2.0), ("t10-99-1-2", 700.0))
    ]
    violations = check(sorted([*correct(), *taken], key=lambda event: event.at_s))
    assert not [violation for violation in violations if "followed after" in violation.what]


def test_every_guarantee_is_broken_at_least_once() -> None:
    """No check passes whatever the history is."""
    assert {guarantee for guarantee, _, _ in FAULTS} == set(GUARANTEES)
    numbers = [check.__doc__ and int(check.__doc__.partition(".")[0]) for check in GUARANTEES.values()]
    assert numbers == list(GUARANTEES) == [*range(1, 12), 13, 14]


@pytest.mark.parametrize(
    ("outcome", "told_of"), [("ok", False), ("unavailable", False), ("not-durable", False), ("fenced", True)]
)
def test_a_checkpoint_may_be_gone_where_a_trainer_that_was_not_fenced_yet_went_on(outcome: str, told_of: bool) -> None:
    """One checkpoint is kept; a later one of another trainer may have dropped it."""
    history = correct()
    history.append(wrote("checkpoint", 2, 1, 18.0, outcome))
    a_kept_checkpoint_is_refused(history)
    violations = check(sorted(history, key=lambda event: event.at_s))
    assert any("attach at kept checkpoint 1 was refused" in violation.what for violation in violations) is told_of


@pytest.mark.parametrize("late_at_s", [None, 6.0, 12.0])
def test_a_late_attach_at_an_earlier_step_voids_a_checkpoint(late_at_s: float | None) -> None:
    """The attach of a trainer that stood still may take effect after a newer trainer has gone on."""
    history = correct()
    if late_at_s:
        late = Attached(**answered(late_at_s), resume_step=0, on_resume="resample", world=1, epoch=9, step=0)
        history.append(late)
    a_kept_checkpoint_is_refused(history)
    violations = check(sorted(history, key=lambda event: event.at_s))
    refused = any("attach at kept checkpoint 1 was refused" in violation.what for violation in violations)
    assert refused is (late_at_s != 12.0)


def test_runs_are_judged_each_by_itself() -> None:
    """The same ids in two runs are two groups."""
    history = correct()
    other = [msgspec.structs.replace(event, run="other") for event in correct()]
    assert check(sorted(history + other, key=lambda event: event.at_s)) == []
