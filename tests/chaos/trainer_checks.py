"""Checks of guarantees 7, 8 and 10: bytes of batches, fencing of trainers, rewinds.

Each has the sentence of its guarantee as docstring and yields violations. `checker` has the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from replaybuf.wire.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    BatchRecord,
    CheckpointRecord,
    PolicyRecord,
    RewindRecord,
)
from tests.chaos.history import OK, UNAVAILABLE, Attached, BatchAsked, TrainerWrote
from tests.chaos.ledger_walk import WalkState, walk
from tests.chaos.run_history import RunHistory


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
    for call in of_trainers(run):
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
    """Return whether the checkpoint must still be there.

    Another trainer that is not fenced yet may have gone on, and dropped it: where `keep` later ones can have taken
    effect since somebody resumed there or before. Or a late attach at an earlier step voided it.
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
    written_s = max(
        (w.sent_s for w in run.wrote if (w.kind, w.value) == ("checkpoint", step) and w.at_s < attached.sent_s),
        default=0.0,
    )
    voided = any(a.epoch and a.step < step and written_s < a.at_s < attached.at_s for a in run.attached)
    return len(later) < keep and not voided


def of_trainers(run: RunHistory) -> list[TrainerWrote | BatchAsked]:
    return [*run.wrote, *run.asked]


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


def _record_after_attach(run: RunHistory, epoch: int) -> AnyRecord | None:
    for (_, record), (_, following) in zip(run.ledger, run.ledger[1:], strict=False):
        if isinstance(record, AttachRecord) and record.epoch == epoch:
            return following
    return None
