"""Checks of guarantees 1 to 6: stored groups, their uses, and the batches that hold them.

Each has the sentence of its guarantee as docstring and yields violations. `checker` has the table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from replaybuf.wire.ledger import AckRecord, AttachRecord, BatchRecord, TrimRecord
from tests.chaos.adapter_checks import rows_hold_one_adapter
from tests.chaos.content import COLUMN, GROUP_SIZE, checksum, priority_of, source_of, tokens_of
from tests.chaos.copy_checks import cursors_read_each_group_once, restores_bring_all_back
from tests.chaos.fault_checks import reports_beside_older
from tests.chaos.history import OK, BatchAsked, StateSeen
from tests.chaos.ledger_walk import WalkState, final_state, walk
from tests.chaos.run_history import RunHistory

SETTLED = ("state", "step", "epoch", "generation", "published_version", "groups", "tokens", "tickets", "staleness")
"""What a restart may not change of a state at rest."""


def stored_means_stored(run: RunHistory) -> Iterator[str]:
    """1. What was answered (stored, attached, acked) survives kill -9 of every process, Redis included."""
    stored = run.stored_groups()
    trimmed = [sent for sent in run.sent_again if sent.outcome == "duplicate"]
    ids = {group.group_id for group in stored.values()} | {sent.group_id for sent in trimmed}
    prompts = {group.prompt for group in stored.values()} | {sent.prompt for sent in trimmed}
    for sent in run.sent:
        if sent.outcome == "stored" and sent.group_id not in ids:
            yield f"group {sent.group_id} was answered stored and is not there"
        if sent.outcome == "duplicate" and not (sent.group_id in ids or sent.prompt in prompts - {None}):
            yield f"group {sent.group_id} was answered duplicate, and no such group is there"
    recorded = {("attach", record.epoch, 0) for _, record in run.ledger if isinstance(record, AttachRecord)}
    recorded |= {("ack", record.epoch, record.step) for _, record in run.ledger if isinstance(record, AckRecord)}
    answered = {("attach", attached.epoch, 0) for attached in run.attached if attached.epoch}
    answered |= {(wrote.kind, wrote.epoch, wrote.value) for wrote in run.wrote if wrote.outcome == OK}
    for kind, epoch, value in sorted(answered - recorded):
        if kind in ("attach", "ack"):
            yield f"{kind} with epoch {epoch} (step {value}) was answered and is not in the ledger"
    for entry, record, before in walk(run.ledger):
        if isinstance(record, AckRecord) and record.priorities and record.step in before.standing:
            held = before.standing[record.step].groups
            if record.priorities != {group.number: priority_of(group.group_id, record.step) for group in held}:
                yield f"entry {entry}: the ack of step {record.step} has other priorities than its trainer sent"
    yield from reports_beside_older(run)
    for payload in run.payloads:
        if payload.rollouts is None:
            yield f"the rollouts of group {payload.group_id}, which may still be needed, are gone"
    gone = _trimmed(run)
    for seen in _settled(run):
        numbers = {number for number in stored if number > gone}
        missing = set(range(gone + 1, seen.state["groups"]["stored"] + 1)) ^ numbers
        if missing:
            yield f"{seen.state['groups']['stored']} groups are stored; group numbers {sorted(missing)[:10]} do not fit"
        if seen.state["groups"]["dead_lettered"]:
            yield f"{seen.state['groups']['dead_lettered']} stored groups are not readable any more"
    yield from _changed_by_restart(run)
    yield from cursors_read_each_group_once(run)
    yield from restores_bring_all_back(run)


def append_is_idempotent(run: RunHistory) -> Iterator[str]:
    """2. A group is stored once, by its id and by its ticket's prompt; again is `duplicate` and changes nothing."""
    stored = [sent for sent in run.sent if sent.outcome == "stored"]
    for name, count in Counter(sent.group_id for sent in stored).items():
        if count > 1:
            yield f"group {name} was answered stored {count} times"
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for number, group in run.stored_groups().items():
        numbers[group.group_id].add(number)
    for group_id, of_id in numbers.items():
        if len(of_id) > 1:
            yield f"group {group_id} is stored {len(of_id)} times, as {sorted(of_id)}"
    versions = {group.group_id: group.policy_version for group in run.stored_groups().values()}
    for sent in stored:
        if versions.get(sent.group_id, sent.policy_version) != sent.policy_version:
            there = versions[sent.group_id]
            yield f"group {sent.group_id} was stored with version {sent.policy_version} and is there with {there}"


def nothing_is_lost_in_between(run: RunHistory) -> Iterator[str]:
    """3. Conservation: stored = live + in batches + retired + evicted + dead-lettered, at every moment."""
    for seen in run.states:
        if _total(seen.state["groups"]) != seen.state["groups"]["stored"]:
            yield f"at {seen.at_s:.3f} {seen.server} reported {seen.state['groups']}"
    for folded in run.folded:
        if _total(folded.groups) != folded.groups["stored"]:
            yield f"the streams fold to {folded.groups}"
        for seen in _settled(run)[-1:]:
            recorded = {name: count for name, count in seen.state["groups"].items() if name != "rejected"}
            if recorded != folded.groups:
                yield f"the streams fold to {folded.groups}, the service reports {recorded}"


def use_is_bounded(run: RunHistory) -> Iterator[str]:
    """4. In the surviving history a group is in at most `max_uses` batches, and only in those its strategy may use."""
    for entry, record, before in _assembled(run):
        for held in record.groups:
            uses = before.uses[held.number] + 1
            if before.max_uses is not None and uses > before.max_uses:
                yield f"entry {entry}: step {record.step} uses group {held.group_id} for the time {uses}"
            if uses != held.times_sampled:
                yield f"entry {entry}: group {held.group_id} is counted {held.times_sampled} times, used {uses} times"
            if before.cooldown and record.step < before.rests_until(held.number):
                yield f"entry {entry}: step {record.step} uses group {held.group_id}, which rests"
            source = source_of(held.group_id, held.prompt_id)
            if before.mix and source not in before.mix:
                yield f"entry {entry}: step {record.step} uses group {held.group_id} of {source}, not in the mix"
    bound = {record.batch_id: before.max_uses for _, record, before in _assembled(run)}
    for asked, rollout in _rollouts(run):
        limit = bound.get(asked.body.batch_id) if asked.body else None
        if limit is not None and rollout.times_sampled > limit:
            yield f"step {asked.step} was served with group {rollout.group_id} used {rollout.times_sampled} times"


def staleness_is_bounded(run: RunHistory) -> Iterator[str]:
    """5. Staleness at use is within the strategy's bound, always; what can no longer be used is evicted."""
    stored = run.stored_groups()
    for entry, record, before in _assembled(run):
        for held in record.groups:
            staleness = before.version(record.step, held.adapter) - held.policy_version
            if staleness < 0 or (before.max_staleness is not None and staleness > before.max_staleness):
                yield f"entry {entry}: group {held.group_id} has staleness {staleness} at step {record.step}"
            if held.staleness != staleness:
                yield f"entry {entry}: group {held.group_id} has staleness {staleness}, written {held.staleness}"
            if held.number in stored and stored[held.number].policy_version != held.policy_version:
                yield f"entry {entry}: group {held.group_id} has another version than it was stored with"
    adapters = {group.group_id: group.adapter for group in stored.values()}
    for asked, rollout in _rollouts(run):
        part = run.part(asked, adapters.get(rollout.group_id, ""))
        if asked.body and rollout.staleness != (part or asked.body).version - rollout.policy_version:
            yield f"step {asked.step} was served with a wrong staleness for group {rollout.group_id}"
    yield from _unusable_and_live(run)


def groups_stay_whole(run: RunHistory) -> Iterator[str]:
    """6. A batch holds whole groups, with the very tokens that were appended."""
    parts: defaultdict[tuple[str, int, int], dict[int, BatchAsked]] = defaultdict(dict)
    for asked in run.bodies:
        if asked.body:
            parts[asked.body.batch_id, asked.epoch, asked.world][asked.rank] = asked
    for (batch_id, _, world), ranks in parts.items():
        record = run.batches.get(batch_id)
        if record is None:
            continue  # guarantee 7 reports it
        held = {group.group_id: group for group in record.groups}
        rollouts = [rollout for asked in ranks.values() if asked.body for rollout in asked.body.rollouts]
        for rollout in rollouts:
            of_record = held.get(rollout.group_id)
            if of_record is None:
                yield f"step {record.step} was served with group {rollout.group_id}, which its record does not hold"
            elif rollout.tokens != checksum(tokens_of(rollout.group_id, of_record.prompt_id, rollout.rollout)):
                yield f"step {record.step}: rollout {rollout.rollout} of {rollout.group_id} holds other tokens"
            elif rollout.reference is not (True if COLUMN in record.options.get("requires", ()) else None):
                yield f"step {record.step}: rollout {rollout.rollout} of {rollout.group_id} lacks its right {COLUMN}"
        if len(ranks) == world:
            there = Counter((rollout.group_id, rollout.rollout) for rollout in rollouts)
            wanted = Counter({(group_id, number): 1 for group_id in held for number in range(GROUP_SIZE)})
            if there != wanted:
                yield f"step {record.step}, {world} ranks: groups are not whole: {there - wanted} or {wanted - there}"
    yield from rows_hold_one_adapter(run)
    for payload in run.payloads:
        for number, tokens in enumerate(payload.rollouts or []):
            if tokens != checksum(tokens_of(payload.group_id, payload.prompt_id, number)):
                yield f"group {payload.group_id} is stored with other tokens in rollout {number}"


def _settled(run: RunHistory) -> list[StateSeen]:
    return [seen for seen in run.states if seen.moment]


def _changed_by_restart(run: RunHistory) -> Iterator[str]:
    before, after = ([seen.state for seen in run.states if seen.moment == moment] for moment in ("before", "after"))
    for old, new in zip(before, after, strict=True):
        for name in SETTLED:
            if old[name] != new[name]:
                yield f"a restart changed {name} from {old[name]} to {new[name]}"


def _assembled(run: RunHistory) -> Iterator[tuple[int, BatchRecord, WalkState]]:
    for entry, record, before in walk(run.ledger):
        if isinstance(record, BatchRecord):
            yield entry, record, before


def _trimmed(run: RunHistory) -> int:
    """Return the number up to which groups need not be listed at the end: a trim sets a few of them aside."""
    recorded = [record.groups for _, record in run.ledger if isinstance(record, TrimRecord)]
    return max([*recorded, min((group.number for group in run.groups if group.last), default=1) - 1])


def _total(groups: dict[str, Any]) -> int:
    evicted: dict[str, int] = groups["evicted"]
    rest: int = groups["live"] + groups["in_batches"] + groups["retired"] + groups["dead_lettered"]
    return rest + sum(evicted.values())


def _rollouts(run: RunHistory) -> Iterator[tuple[BatchAsked, Any]]:
    for asked in run.bodies:
        for rollout in asked.body.rollouts if asked.body else []:
            yield asked, rollout


def _unusable_and_live(run: RunHistory) -> Iterator[str]:
    """Find groups that are live at the end although no step to come may use them."""
    before = final_state(run.ledger)
    step = _settled(run)[-1].state["step"] if _settled(run) else 0
    for group in run.groups:
        if group.last and group.state == "live" and before.max_staleness is not None:
            staleness = before.version(step, group.adapter) - group.policy_version
            if staleness > before.max_staleness:
                yield f"group {group.group_id} is live with staleness {staleness} at step {step}"
