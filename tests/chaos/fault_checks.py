"""Checks of what a fault may change: tickets while clocks jump, an older Redis, and the calls beside a hostile one."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from replaybuf.errors import DataLost
from replaybuf.wire.ledger import ConfigRecord
from tests.chaos.history import (
    OK,
    Attached,
    Attacked,
    Call,
    GroupSent,
    Prompt,
    TicketsTaken,
    TrainerWrote,
)
from tests.chaos.run_history import RunHistory

CLOCK_SLACK_S = 0.1
REPORT_S = 10.0
"""How long a server may still report lost data after Redis has all of it again."""
HEAD_BYTES = 16 << 20
"""More than the buffers of both sockets: a server that takes so much of one head has no bound."""
ANSWERS = {
    "endless header": (431, 400),
    "many headers": (431, 400),
    "refused JSON": (400, 408, 413, 422),
    "cut body": (400, 408),
    "oversized body": (413,),
    "half heads": (408,),
}
BUSY = 503
"""May answer every attack."""
EXPECTED_OF_RANKS = frozenset(
    {
        *("body", "waiting", "fenced", "wrong-step", "gone", "too-many-requests"),
        *("unavailable", "not-leader", "data-lost", "not-durable"),
    }
)


def issued_too_early(run: RunHistory) -> Iterator[str]:
    """Find tickets that were issued again before their time was over, although nobody had given them up."""
    config = next((record.config for _, record in run.ledger if isinstance(record, ConfigRecord)), {})
    ttl_s = config.get("tickets", {}).get("ttl_s")
    if ttl_s is None:
        return
    given_up = {returned.ticket for returned in run.returned}
    rejected: defaultdict[Prompt | None, list[float]] = defaultdict(list)
    for sent in run.sent:
        if sent.outcome == "rejected":
            rejected[sent.prompt].append(sent.sent_s)
    attached = [call.sent_s for call in run.attached]
    for prompt, attempts in _attempts(run.tickets).items():
        for (_, ticket, from_s, _), (_, again, _, until_s) in itertools.pairwise(attempts):
            early = until_s < from_s + ttl_s - CLOCK_SLACK_S and ticket not in given_up
            freed = any(from_s < at_s < until_s for at_s in (*attached, *run.producers_killed, *rejected[prompt]))
            if early and not freed:
                yield f"ticket {ticket} had {ttl_s:g} s; {again} followed after {until_s - from_s:.3f} s"


def _attempts(tickets: Sequence[TicketsTaken]) -> dict[Prompt, list[tuple[int, str, float, float]]]:
    """List (attempt, ticket, earliest issue, latest issue) of every prompt."""
    attempts: defaultdict[Prompt, list[tuple[int, str, float, float]]] = defaultdict(list)
    for taken in tickets:
        for ticket, prompt_index, attempt in taken.tickets:
            attempts[taken.adapter, prompt_index].append((attempt, ticket, taken.sent_s, taken.at_s))
    return {prompt: sorted(issued, key=_order_of_issue) for prompt, issued in attempts.items()}


def _order_of_issue(entry: tuple[int, str, float, float]) -> tuple[int, list[int]]:
    attempt, ticket, _, _ = entry
    return attempt, [int(digits) for digits in re.findall(r"\d+", ticket)]  # t10 comes after t8


def reports_beside_older(run: RunHistory) -> Iterator[str]:
    """Find reports of lost data while Redis had all of it."""
    for call in run.calls:
        if call.outcome == "data-lost" and not _may_report_loss(run, call.at_s):
            yield report_beside_older(call)


def report_beside_older(call: Call) -> str:
    """Describe a report of lost data while Redis had all of it."""
    return f"{call.server} reported acknowledged data as lost at {call.at_s:.3f}"


def _may_report_loss(run: RunHistory, at_s: float) -> bool:
    return any(older.from_s <= at_s <= older.right_s + REPORT_S for older in run.older)


def lost_writes_are_noticed(run: RunHistory) -> Iterator[str]:
    """13. A Redis without acknowledged writes is reported by every server, and nothing is written to it."""
    for accepted in run.losses:
        for difference in accepted.differences:
            yield f"{accepted.side} accepted a loss: {difference}"
    for older in run.older:
        if older.written:
            yield f"{older.kind}: the service changed {', '.join(older.written)} of a Redis that lacked data"
        for server in older.silent:
            yield f"{older.kind}: {server} did not report lost data"
        calls: list[GroupSent | TrainerWrote | Attached | TicketsTaken]
        calls = [*run.sent, *run.wrote, *run.attached, *run.tickets]
        for call in calls:
            if older.from_s < call.sent_s and call.at_s < older.at_s and _has_written(call, run):
                yield f"{older.kind}: {call.server} answered {type(call).__name__} while Redis lacked data"


def _has_written(call: GroupSent | TrainerWrote | Attached | TicketsTaken, run: RunHistory) -> bool:
    match call:
        case GroupSent():
            return call.outcome == "stored"
        case Attached():
            return bool(call.epoch)
        case TicketsTaken():
            return bool(call.tickets)
    return call.outcome == OK and not _repeats(call, run)


def _repeats(call: TrainerWrote, run: RunHistory) -> bool:
    """Return whether the same may have been written before: a checkpoint that is kept has no epoch.

    Version 0 is published from the start.
    """
    same = (
        (sent.kind, sent.adapter, sent.value) == (call.kind, call.adapter, call.value)
        and (call.kind == "checkpoint" or sent.epoch == call.epoch)
        for sent in run.wrote
        if sent.sent_s < call.sent_s
    )
    return (call.kind == "publish" and call.value == 0) or any(same)


def nobody_pays_for_others(run: RunHistory) -> Iterator[str]:
    """14. No hostile body, eviction or number of waiting ranks stops others, or a run."""
    for seen in run.states:
        if seen.state["state"] == "paused":
            yield f"the run was paused at {seen.at_s:.3f}: {seen.state.get('paused_reason')}"
    for waited in run.ranks_waited:
        for outcome, count in waited.outcomes.items():
            if outcome not in EXPECTED_OF_RANKS:
                yield f"{count} calls of {waited.ranks} waiting ranks ended as {outcome}"
        if not (waited.outcomes.keys() & {"body", "waiting"}) and not run.hurt(waited.from_s, waited.at_s):
            yield f"none of {waited.ranks} waiting ranks was served, and nothing else was hurt"
    for attacked in run.attacked:
        yield from _answered_wrongly(run, attacked)


def _answered_wrongly(run: RunHistory, attacked: Attacked) -> Iterator[str]:
    hurt = run.hurt(attacked.from_s, attacked.at_s)
    where = f"{attacked.attack} at {attacked.server}"
    allowed = {*ANSWERS[attacked.attack], BUSY}
    if _may_report_loss(run, attacked.at_s):
        allowed.add(DataLost.status)  # a request of a run is refused before its body is read
    if attacked.status > 0 and attacked.status not in allowed:
        yield f"{where} was answered {attacked.status}"
    if attacked.status < 0 and not hurt:
        yield f"{where} was still open after {attacked.at_s - attacked.from_s:.1f} s"
    if attacked.attack.endswith(("header", "headers")) and attacked.sent_bytes > HEAD_BYTES:
        yield f"{where} was taken with {attacked.sent_bytes:,} bytes"
    if not attacked.beside.get("200") and not hurt:
        yield f"nobody was served beside {where}: {attacked.beside}"
