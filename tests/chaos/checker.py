"""Check of a recorded history against the guarantees. Pure: events in, violations out.

One function per guarantee, in the order of the list, with its sentence as docstring; each yields violations. The checks
read three things: answers to clients (`RunHistory.calls` of each kind), the ledger (`walk`), and the state at the end.
Nothing here uses replaybuf's own fold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from replaybuf.wire.contract import REASONS
from replaybuf.wire.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    BatchRecord,
    CheckpointRecord,
    PolicyRecord,
    RewindRecord,
)
from tests.chaos.adapter_checks import adapters_take_turns, rows_hold_one_adapter
from tests.chaos.content import GROUP_SIZE, checksum, priority_of, source_of, tokens_of
from tests.chaos.fault_checks import (
    issued_too_early,
    lost_writes_are_noticed,
    nobody_pays_for_others,
    reports_beside_older,
)
from tests.chaos.history import (
    OK,
    UNAVAILABLE,
    AnyEvent,
    Attached,
    BatchAsked,
    Prompt,
    StateSeen,
    TrainerWrote,
)
from tests.chaos.ledger_walk import WalkState, final_state, walk
from tests.chaos.run_history import RunHistory

BLOCKED_ON = ("producers", "trainer", "operator", "nothing")
LEGITIMATE_REJECTIONS = ("lost_lineage", "version_above_published")
"""Reasons that a rewind gives a producer which did nothing wrong; no other rejection can come."""
SETTLED = ("state", "step", "epoch", "generation", "published_version", "groups", "tokens", "tickets", "staleness")
"""What a restart may not change of a state at rest."""


class Violation(NamedTuple):
    """One guarantee of design.md section 3 that did not hold, and how."""

    guarantee: int
    run: str
    what: str


def check(history: Sequence[AnyEvent]) -> list[Violation]:
    """Check every guarantee for every run of a history."""
    found = []
    faults = [event for event in history if not event.run]
    for run in sorted({event.run for event in history if event.run}):
        events = RunHistory([event for event in history if event.run == run], faults)
        for guarantee, check_run in GUARANTEES.items():
            found += [Violation(guarantee, run, what) for what in check_run(events)]
    return found


def stored_means_stored(run: RunHistory) -> Iterator[str]:
    """1. What was answered (stored, attached, acked) survives kill -9 of every process, Redis included."""
    stored = run.stored_groups()
    trimmed = {sent.group_id for sent in run.sent_again if sent.outcome == "duplicate"}
    ids = {group.group_id for group in stored.values()} | trimmed
    prompts = {group.prompt for group in stored.values()}
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
    for seen in _settled(run):
        missing = set(range(_trimmed(run) + 1, seen.state["groups"]["stored"] + 1)) ^ {
            number for number in stored if number > _trimmed(run)
        }
        if missing:
            yield f"{seen.state['groups']['stored']} groups are stored; group numbers {sorted(missing)[:10]} do not fit"
        if seen.state["groups"]["dead_lettered"]:
            yield f"{seen.state['groups']['dead_lettered']} stored groups are not readable any more"
    yield from _changed_by_restart(run)


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


def bytes_stay_the_same(run: RunHistory) -> Iterator[str]:
    """7. (run, step, rank, world size) answers byte-identical bodies of the batch that the ledger records."""
    seen: dict[tuple[int, int, int, int], str] = {}
    for asked in run.bodies:
        if asked.body is None:
            continue
        key = (asked.step, asked.body.generation, asked.rank, asked.world)
        if seen.setdefault(key, asked.body.sha256) != asked.body.sha256:
            yield f"(step, generation, rank, world) {key} came with other bytes from {asked.server}"
    standing = _standing_by_epoch(run)
    for asked in run.bodies:
        recorded = standing.get(asked.epoch, {}).get(asked.step)
        if asked.body and (
            recorded is None or (recorded.batch_id, recorded.digest) != (asked.body.batch_id, asked.body.digest)
        ):
            yield (
                f"epoch {asked.epoch}, step {asked.step} was served batch {asked.body.batch_id}; "
                f"the ledger has {recorded.batch_id if recorded else 'none'}"
            )


def the_old_are_fenced(run: RunHistory) -> Iterator[str]:
    """8. An older epoch changes nothing; the newest epoch is never refused; there is one assembler."""
    for wrote in run.wrote:
        newest = run.epoch_before(wrote.sent_s)
        if wrote.outcome == OK and wrote.epoch < newest:
            yield f"{wrote.kind} with epoch {wrote.epoch} was answered ok after epoch {newest} had attached"
    newest = max((record.epoch for _, record in run.ledger if isinstance(record, AttachRecord)), default=0)
    for call in _of_trainers(run):
        if call.outcome == "fenced" and call.epoch >= newest:
            yield f"epoch {call.epoch} was fenced, and there is no newer one"
    answered = [attached.epoch for attached in run.attached if attached.epoch]
    if len(answered) != len(set(answered)):
        yield f"one epoch was given to two trainers: {sorted(answered)}"
    for entry, record, before in walk(run.ledger):
        if isinstance(record, AckRecord | PolicyRecord) and record.epoch != before.epoch:
            yield f"entry {entry}: epoch {record.epoch} wrote while {before.epoch} had the run"
        if isinstance(record, AttachRecord) and record.epoch != before.epoch + 1:
            yield f"entry {entry}: epoch {record.epoch} follows {before.epoch}"
    yield from _ledger_is_one(run)


def every_prompt_and_step_once(run: RunHistory) -> Iterator[str]:
    """9. Every prompt index gets one stored group or a recorded reason; resume neither skips nor repeats."""
    stored = Counter(group.prompt for group in run.stored_groups().values() if group.prompt)
    for prompt, count in stored.items():
        if count > 1:
            yield f"prompt {prompt} is stored {count} times"
    trimmed = {sent.prompt for sent in run.sent_again if sent.outcome == "duplicate"}
    for sent in run.sent_again:
        if sent.outcome == "stored":
            yield f"group {sent.group_id} was not stored until it was sent again at rest"
    if any(drained.drained for drained in run.drained):  # no ticket is left
        missing = _up_to(run.issued()) - stored.keys() - run.failed() - trimmed
        if missing:
            yield f"prompts {sorted(missing)[:20]} were skipped ({len(missing)} in all)"
    yield from _issued_after_stored(run)
    yield from issued_too_early(run)
    for sent in run.sent:
        if sent.outcome == "rejected" and sent.reason not in LEGITIMATE_REJECTIONS:
            yield f"group {sent.group_id} of prompt {sent.prompt_index} was rejected as {sent.reason}"
    yield from adapters_take_turns(run)
    for entry, record, before in walk(run.ledger):
        if isinstance(record, AckRecord) and (record.step != before.step or record.step not in before.standing):
            yield f"entry {entry}: step {record.step} is acked, the next one is {before.step}"
        if isinstance(record, BatchRecord) and record.step != before.next_step:
            yield f"entry {entry}: step {record.step} is assembled, the next one is {before.next_step}"
    for call in _of_trainers(run):
        if call.outcome in ("wrong-step", "conflict") and call.epoch == run.epoch_before(call.at_s):
            yield f"the trainer of epoch {call.epoch}, in order, was refused: {call}"


def rewind_restores(run: RunHistory) -> Iterator[str]:
    """10. Attaching at step k restores the history to k; nothing that a kept checkpoint may need is deleted."""
    for attached in run.attached:
        if attached.outcome in ("wrong-step", "conflict", "gone") and _is_kept(run, attached):
            yield f"attach at kept checkpoint {attached.resume_step} was refused: {attached.outcome}"
        if attached.epoch and attached.step != attached.resume_step and attached.resume_step is not None:
            yield f"attach at {attached.resume_step} was answered step {attached.step}"
    for asked in run.asked:
        if asked.outcome == "gone" and asked.epoch == run.epoch_before(asked.at_s):
            yield f"step {asked.step} is gone, which epoch {asked.epoch} may resume"
    for entry, record, before in walk(run.ledger):
        if isinstance(record, RewindRecord):
            if not before.oldest_step <= record.step <= before.step:
                yield f"entry {entry}: rewind to {record.step} outside {before.oldest_step}..{before.step}"
            versions = {name: before.version(record.step, name) for name in before.own or ("",)}
            if (record.versions or {"": record.version}) != versions or record.generation != before.generation + 1:
                yield f"entry {entry}: rewind to versions {record.versions or record.version}, not {versions}"
        if isinstance(record, CheckpointRecord) and not before.oldest_step <= record.step <= before.step:
            yield f"entry {entry}: checkpoint {record.step} outside {before.oldest_step}..{before.step}"
    for attached in run.attached:
        follows = _record_after_attach(run, attached.epoch)
        if attached.epoch and isinstance(follows, RewindRecord) and follows.on_resume != attached.on_resume:
            yield f"epoch {attached.epoch} asked for {attached.on_resume} and got {follows.on_resume}"


def _is_kept(run: RunHistory, attached: Attached) -> bool:
    """Return whether the checkpoint must still be there. Another trainer that is not fenced yet may have gone on, and
    dropped it: where `keep` later ones can have taken effect since somebody resumed there or before.
    """
    step = attached.resume_step or 0
    keep = max((record.keep for _, record in run.ledger if isinstance(record, CheckpointRecord)), default=1)
    since_s = max(
        (a.at_s for a in run.attached if a.epoch and a.step <= step and a.at_s < attached.sent_s), default=0.0
    )
    later = {
        call.value
        for call in run.wrote
        if call.kind == "checkpoint" and call.value > step and since_s < call.at_s and call.sent_s < attached.at_s
        if call.outcome in (OK, *UNAVAILABLE)
    }
    return len(later) < keep


def no_silent_wait(run: RunHistory) -> Iterator[str]:
    """11. Every "no batch" and "no ticket" names the reason, what is there, what is missing and who has to act."""
    waits = [asked.waiting for asked in run.asked if asked.outcome == OK and asked.body is None]
    waits += [taken.waiting for taken in run.tickets if taken.outcome == OK and not taken.tickets]
    for waiting in waits:
        if _unexplained(waiting):
            yield f"a wait is not explained: {_unexplained(waiting)}"
    for seen in run.states:
        if seen.state["waiting"] is not None and _unexplained(seen.state["waiting"]):
            yield f"the state does not explain its wait: {seen.state['waiting']}"
    for call in run.calls:
        if call.outcome in ("internal", "strategy-fault", "malformed"):
            yield f"a call was answered {call.outcome} by {call.server}: {call.detail}"
    for drained in run.drained:
        if not drained.drained:
            yield f"the load did not come to rest after the faults: {drained.stood}"


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


# ---------------------------------------------------------------------- what the checks are made of


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


def _of_trainers(run: RunHistory) -> list[TrainerWrote | BatchAsked]:
    return [*run.wrote, *run.asked]


def _trimmed(run: RunHistory) -> int:
    """Say up to which number groups are listed no more at the end."""
    return min((group.number for group in run.groups if group.last), default=1) - 1


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


def _standing_by_epoch(run: RunHistory) -> dict[int, dict[int, BatchRecord]]:
    """Return the batch of each step per epoch: a rewind comes only with its attach."""
    standing: dict[int, dict[int, BatchRecord]] = {}
    before = WalkState()
    for _, record, before in walk(run.ledger):
        if isinstance(record, AttachRecord):
            standing[before.epoch] = dict(before.standing)
    return standing | {before.epoch: dict(before.standing)}


def _ledger_is_one(run: RunHistory) -> Iterator[str]:
    """Find traces of two writers: gaps, entries with two contents, two batches for one step."""
    entries = [entry for entry, _ in run.ledger]
    if entries != list(range(1, len(entries) + 1)):
        missing = sorted(set(range(1, max(entries) + 1)) - set(entries))
        yield f"the ledger has gaps: {missing[:10]}"
    recorded: dict[int, dict[str, Any]] = {}
    for seen in run.ledger_seen:
        if recorded.setdefault(seen.entry, seen.record) != seen.record:
            yield f"entry {seen.entry} has two contents: {recorded[seen.entry]} and {seen.record}"
    made = Counter((record.generation, record.step) for record in run.batches.values())
    for key, count in made.items():
        if count > 1:
            yield f"(generation, step) {key} was assembled {count} times"


def _issued_after_stored(run: RunHistory) -> Iterator[str]:
    """Find tickets for a prompt whose group had been answered stored before they were asked for."""
    stored_s: dict[Prompt, float] = {}
    for sent in run.sent:
        if sent.prompt and sent.outcome in ("stored", "duplicate"):
            stored_s[sent.prompt] = min(sent.at_s, stored_s.get(sent.prompt, sent.at_s))
    for taken in run.tickets:
        for ticket, prompt_index, _ in taken.tickets:
            if stored_s.get((taken.adapter, prompt_index), taken.sent_s) < taken.sent_s:
                yield f"ticket {ticket} was issued after the group of prompt {prompt_index} had been stored"


def _up_to(prompts: set[Prompt]) -> set[Prompt]:
    """Name, of each adapter, all prompts up to the last of these."""
    last: dict[str, int] = {}
    for adapter, prompt_index in prompts:
        last[adapter] = max(prompt_index, last.get(adapter, 0))
    return {(adapter, index) for adapter, end in last.items() for index in range(end + 1)}


def _record_after_attach(run: RunHistory, epoch: int) -> AnyRecord | None:
    for (_, record), (_, following) in zip(run.ledger, run.ledger[1:], strict=False):
        if isinstance(record, AttachRecord) and record.epoch == epoch:
            return following
    return None


def _unexplained(waiting: dict[str, Any] | None) -> str | None:
    """Return what is missing in a waiting answer, or None."""
    if waiting is None:
        return "there is no reason at all"
    if waiting.get("reason") not in REASONS:
        return f"reason is {waiting.get('reason')!r}"
    if waiting.get("blocked_on") not in BLOCKED_ON:
        return f"blocked_on is {waiting.get('blocked_on')!r}"
    for name in ("have", "need"):
        amount = waiting.get(name) or {}
        if not all(isinstance(amount.get(unit), int) and amount[unit] >= 0 for unit in ("groups", "tokens")):
            return f"{name} is {amount}"
    return None
