"""The judge of a schedule: the checker of chaos, and what only a simulated world can be asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replaybuf.kernel.state.tickets import parse_ticket
from replaybuf.wire.ledger import BatchRecord, ConfigRecord, RewindRecord
from tests.chaos.checker import check
from tests.chaos.fault_checks import REPORT_S, issued_too_early, report_beside_older
from tests.chaos.history import AnyEvent, GroupSent, Healed, TicketsTaken
from tests.chaos.ledger_walk import walk
from tests.chaos.run_history import RunHistory
from tests.simulation.mix import EXACT, Mix
from tests.simulation.producing import TicketedGroup


def judge(history: Sequence[AnyEvent], mix: Mix, *, jumped: bool) -> list[str]:
    """Return violations of the guarantees. `jumped`: the clock of a server was changed."""
    run = RunHistory([event for event in history if event.run])
    halted, removed = _halted(run), _removed(run)
    if removed:
        history = [event for event in history if not _ended_by_removal(event, removed)]
    # The next leader takes a deadline from the wall clock of the last one; where they differ it is an estimate.
    estimated = set(issued_too_early(run)) if jumped else set()
    estimated |= set(_reports_beside_faults(run, history))
    violations = [
        f"{violation.guarantee}: {violation.what}"
        for violation in check(history)
        if violation.what not in estimated and not violation.what.startswith(halted)
    ]
    violations += _stored_by_old_rules(run)
    # A group that lacks a late column leaves its slot until it has it.
    in_order = mix.strategy == EXACT and not mix.staged
    return violations + (list(_slots_out_of_order(run)) if in_order else [])


def _reports_beside_faults(run: RunHistory, history: Sequence[AnyEvent]) -> Iterator[str]:
    """Find late reports of lost data while another fault of Redis kept a server from reading the right one again."""
    healed = sorted(event.at_s for event in history if isinstance(event, Healed) and event.process == "valkey")
    for older in run.older:
        until_s = older.right_s
        for at_s in healed:
            until_s = at_s if until_s < at_s <= until_s + REPORT_S else until_s
        for call in run.calls:
            if call.outcome == "data-lost" and older.from_s <= call.at_s <= until_s + REPORT_S:
                yield report_beside_older(call)


def _removed(run: RunHistory) -> set[str]:
    """Name the adapters that an operator ever removed."""
    return {
        name
        for _, record in run.ledger
        if isinstance(record, ConfigRecord)
        for name, spec in record.config.get("adapters", {}).items()
        if spec.get("removed")
    }


def _halted(run: RunHistory) -> tuple[str, ...]:
    """Return how a report begins that an adapter was starved, for those that an operator paused or removed.

    After a rewind for all of them: it takes back what they had trained, and their groups stay counted.
    """
    rewound = any(isinstance(record, RewindRecord) for _, record in run.ledger)
    return tuple(
        f"adapter {name} has "
        for _, record in run.ledger
        if isinstance(record, ConfigRecord)
        for name, spec in record.config.get("adapters", {}).items()
        if rewound or spec.get("removed") or spec.get("paused")
    )


def _ended_by_removal(event: AnyEvent, removed: set[str]) -> bool:
    """Return whether an event is of a prompt that may have ended with its adapter, the recorded reason."""
    if isinstance(event, TicketsTaken):
        return event.adapter in removed
    return isinstance(event, GroupSent) and event.adapter in removed and event.reason == "unknown_adapter"


def _slots_out_of_order(run: RunHistory) -> Iterator[str]:
    """Find batches of exact slots with a prompt before one that an earlier batch has, unless it had failed."""
    for entry, record, before in walk(run.ledger):
        if not isinstance(record, BatchRecord):
            continue
        held = [one.groups for step, one in before.standing.items() if step < record.step]
        prompts = [group.prompt_index for groups in held for group in groups if group.prompt_index is not None]
        earlier = max(prompts, default=-1)
        slots = [group for group in record.groups if (group.adapter, group.prompt_index) not in run.failed()]
        indexes = [group.prompt_index for group in slots if group.prompt_index is not None]
        if min(indexes, default=earlier + 1) <= earlier:
            yield f"slots: entry {entry}, step {record.step} has prompts {indexes} after prompt {earlier}"


def _stored_by_old_rules(run: RunHistory) -> Iterator[str]:
    """Find groups that were stored after a rewind which had taken their policy version back."""
    rewinds = [record for _, record in run.ledger if isinstance(record, RewindRecord)]
    numbers = {group.group_id: number for number, group in run.stored_groups().items()}
    for sent in run.sent:
        number = numbers.get(sent.group_id)
        if sent.outcome != "stored" or number is None or not isinstance(sent, TicketedGroup) or not sent.ticket:
            continue
        sampled_in = parse_ticket(sent.ticket).generation
        for rewind in rewinds:
            version = rewind.versions.get(sent.adapter, rewind.version)
            if sampled_in < rewind.generation and rewind.until < number and version < sent.policy_version:
                yield (
                    f"rules: group {number}, {sent.group_id}, of version {sent.policy_version} was stored after "
                    f"generation {rewind.generation} had begun at version {version}"
                )
