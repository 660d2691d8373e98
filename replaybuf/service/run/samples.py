"""Samples of trained steps: a few rollouts stay readable after a checkpoint has freed their groups.

The leader writes the samples of a step before the payloads of its groups are deleted, and records the batch that they
are from. After a rewind, samples of a step that is not trained, or whose batch was taken back, are not shown; those of
the step's new batch replace them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import SpillAway
from replaybuf.kernel.decide.samples import choose_groups, choose_rollouts, find_unsampled
from replaybuf.kernel.state.history import RecordedBatch
from replaybuf.service.bodies.assembly import fetch_groups
from replaybuf.service.bodies.shown_rollout import SAMPLE, show_rollout
from replaybuf.service.run.batches import Batches
from replaybuf.service.run.journal import Journal
from replaybuf.wire.answer.samples import Sample, SampleList, StepSamples, Why, decode_samples, encode_samples
from replaybuf.wire.group import Group
from replaybuf.wire.text.model_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

STEPS_AT_ONCE = 8
"""Steps in one reply of Redis: 8 MiB at most, usually 100 kB."""
SEARCHED_STEPS = 2_000
MOST_STEPS = 100
"""A group may be in thousands of batches."""
PAGE_BYTES = 8 << 20
HELD_BYTES = 64 << 20
"""Frames held for the samples of steps that were trained since the last tick."""


class _Choice(NamedTuple):
    """A group with rollouts to keep: one for each of `reasons`."""

    number: int
    group_id: str
    group: Group
    reasons: list[Why]


class Samples:
    """Keeps and lists the samples of one run. `tokenizer`: samples are kept as its text, without one as token ids."""

    def __init__(self, journal: Journal, batches: Batches) -> None:
        self.tokenizer: Tokenizer | None = None
        self._journal = journal
        self._batches = batches
        self._held: dict[int, tuple[int, list[_Choice]]] = {}
        self._held_bytes = 0
        self._sampled = 0

    async def take_over(self) -> None:
        """Read up to which batch an older leader has kept samples."""
        self._sampled = await self._journal.store.samples.newest_batch(self._journal.name)

    def hold(self, step: int) -> None:
        """Hold the groups from which `keep` takes the samples of a step: its batch may leave memory before.

        The groups of steps beyond `HELD_BYTES` are read again.
        """
        journal = self._journal
        most, made = journal.config.history.samples_per_step, journal.state.records.get(step)
        batch = self._batches.held(step, made) if most and made else None
        if made is None or batch is None:
            return
        index = journal.state.index
        rows = index.rows_of(made.numbers)
        if len(rows) < len(made.numbers):
            return  # some are freed
        chosen = self._choose(step, made, index["reward_mean"][rows], index["rollouts"][rows])
        groups = [batch.groups[position] for position in chosen]
        held_bytes = sum(batch.planned[position].frame_bytes for position in chosen)
        # A rollout as long as a row may be cut: its sample is from the stored group.
        if (
            self._held_bytes + held_bytes > HELD_BYTES
            or max((int(group.lengths.max()) for group in groups), default=0) >= batch.layout.seq_len
        ):
            return
        labels = [batch.record.groups[position] for position in chosen]
        self._held_bytes += held_bytes
        self._held[step] = (
            made.entry,
            [
                _Choice(label.number, label.group_id, group, reasons)
                for label, group, reasons in zip(labels, groups, chosen.values(), strict=True)
            ],
        )

    async def keep(self) -> None:
        """Keep samples of the steps that were trained since the last call. Raises `NotLeader`, `DataLost`.

        Call it before payloads are freed.
        """
        most = self._journal.config.history.samples_per_step
        if not most:
            return
        held, self._held, self._held_bytes = self._held, {}, 0
        ready: list[tuple[int, RecordedBatch, list[_Choice]]] = []
        for step, made in find_unsampled(self._journal.state, self._sampled):
            entry, choices = held.get(step, (0, []))
            if entry == made.entry:
                ready.append((step, made, choices))
                continue
            await self._write_held(ready)
            ready = []
            await self._write([(step, made, await self._read_chosen(step, made))])
        await self._write_held(ready)

    async def _write_held(self, steps: Sequence[tuple[int, RecordedBatch, list[_Choice]]]) -> None:
        if steps:
            await self._write(await asyncio.to_thread(self._show_all, steps))

    async def _write(self, steps: Sequence[tuple[int, RecordedBatch, list[Sample]]]) -> None:
        """Write samples of steps in ascending order."""
        journal = self._journal
        rows = [(step, made.entry, encode_samples(StepSamples(made.entry, samples))) for step, made, samples in steps]
        with journal.recording_refusals():
            await journal.store.samples.write(journal.name, journal.token, rows)
        self._sampled = max(self._sampled, *(made.entry for _, made, _ in steps))

    async def _read_chosen(self, step: int, made: RecordedBatch) -> list[Sample]:
        """Choose and read the samples of a step. Groups whose bytes are gone have none."""
        journal = self._journal
        store = journal.store
        entries = await store.groups.read_entries(journal.name, made.numbers.tolist())
        if not entries:
            return []
        means = np.array([float(entry.values["reward_mean"]) for entry in entries])
        rollouts = np.array([int(entry.values["rollouts"]) for entry in entries])
        samples: list[Sample] = []
        for position, reasons in self._choose(step, made, means, rollouts).items():
            number = entries[position].number
            try:  # one by one: a group may have 64 MB
                fetched = await fetch_groups(store, journal.name, [number], journal.state.pool.columns)
            except SpillAway as error:
                logger.warning("no sample is kept run=%s step=%d: %s", journal.name, step, error.detail)
                continue
            if number in fetched.groups:
                label = fetched.entries[0].strings.group_id
                choice = _Choice(number, label, fetched.groups[number], reasons)
                samples += await asyncio.to_thread(self._show, step, made, choice)
        return samples

    def _choose(
        self, step: int, made: RecordedBatch, means: npt.NDArray[Any], rollouts: npt.NDArray[Any]
    ) -> dict[int, list[Why]]:
        """Choose groups of a step by position, with the reasons."""
        config = self._journal.config
        reasons: dict[int, list[Why]] = {}
        for position, why in choose_groups(
            means, rollouts, config.history.samples_per_step, [config.seed, made.generation, step]
        ):
            reasons.setdefault(position, []).append(why)
        return reasons

    def _show_all(
        self, steps: Sequence[tuple[int, RecordedBatch, list[_Choice]]]
    ) -> list[tuple[int, RecordedBatch, list[Sample]]]:
        return [
            (step, made, [sample for choice in choices for sample in self._show(step, made, choice)])
            for step, made, choices in steps
        ]

    def _show(self, step: int, made: RecordedBatch, choice: _Choice) -> list[Sample]:
        group, seed = choice.group, [self._journal.config.seed, made.generation, step, choice.number]
        reasons = choice.reasons[: group.rollouts]
        places = choose_rollouts(group.rewards, reasons, seed)
        return [
            Sample(
                **msgspec.structs.asdict(show_rollout(group, place, self.tokenizer, SAMPLE)),
                step=step,
                why=why,
                group_id=choice.group_id,
                prompt_id=group.prompt_id,
                prompt_index=group.prompt_index,
                adapter=group.adapter,
                policy_version=group.policy_version,
            )
            for place, why in zip(places, reasons, strict=True)
        ]

    # ------------------------------------------------------------------ queries

    async def list_newest(
        self, limit: int, *, step: int | None = None, before: int | None = None, contains: str | None = None
    ) -> SampleList:
        """Return the samples of up to `limit` steps, newest first; at most `SEARCHED_STEPS` are read for one page.

        `step`: of this step alone; `before`: of steps below it; `contains`: those whose text has these letters.
        """
        kept = await self._journal.store.samples.list_steps(self._journal.name)
        wanted = [known for known in kept if step in (None, known) and (before is None or known < before)]
        listed: list[Sample] = []
        steps = size = 0
        last: int | None = None
        async for read, raw_bytes, samples in self._read(wanted[:SEARCHED_STEPS]):
            matches = [sample for sample in samples if contains is None or _contains(sample, contains.casefold())]
            listed, last = listed + matches, read
            steps, size = steps + bool(matches), size + raw_bytes * bool(matches)
            if steps == limit or size > PAGE_BYTES:
                break
        return SampleList(
            samples=listed,
            next=last if wanted and last != wanted[-1] else None,
            steps=len(kept),
            oldest=kept[-1] if kept else None,
            samples_per_step=self._journal.config.history.samples_per_step,
        )

    async def of_groups(self, steps: Sequence[int]) -> dict[str, list[Sample]]:
        """Return the samples of the newest `MOST_STEPS` of these steps by group."""
        by_group: dict[str, list[Sample]] = {}
        async for _, _, samples in self._read(sorted({*steps}, reverse=True)[:MOST_STEPS]):
            for sample in samples:
                by_group.setdefault(sample.group_id, []).append(sample)
        return by_group

    async def _read(self, steps: Sequence[int]) -> AsyncIterator[tuple[int, int, list[Sample]]]:
        """Read the samples of steps of the current history, with their size in bytes."""
        journal, state = self._journal, self._journal.state
        for start in range(0, len(steps), STEPS_AT_ONCE):
            piece = steps[start : start + STEPS_AT_ONCE]
            for step, raw in zip(piece, await journal.store.samples.read(journal.name, piece), strict=True):
                kept = None if raw is None else self._decode(step, raw)
                made = state.records.get(step)  # a trimmed record is older than any rewind
                current = step < state.step and kept is not None and (made is None or made.entry == kept.entry)
                yield step, len(raw or b""), kept.samples if kept and current else []
            await asyncio.sleep(0)

    def _decode(self, step: int, raw: bytes) -> StepSamples | None:
        try:
            return decode_samples(raw)
        except (msgspec.MsgspecError, ValueError) as error:
            run = self._journal.name
            logger.warning("samples that do not decode are left out run=%s step=%d: %s", run, step, error)
            return None


def _contains(sample: Sample, letters: str) -> bool:
    """Return whether the text of a sample has these letters, which are in case-folded form."""
    return any(isinstance(piece, str) and letters in piece.casefold() for piece in (*sample.prompt, *sample.completion))
