"""Samples of trained steps: a few rollouts stay readable after a checkpoint has freed their groups.

The leader writes the samples of a step before the payloads of its groups are deleted, and records the batch that they
are from. After a rewind, samples of a step that is not trained, or whose batch was taken back, are not shown; those of
the step's new batch replace them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np

from replaybuf.errors import SpillAway
from replaybuf.kernel.decide.samples import choose_groups, choose_rollouts, find_unsampled
from replaybuf.kernel.state.history import RecordedBatch
from replaybuf.service.bodies.assembly import fetch_groups
from replaybuf.service.bodies.shown_rollout import SAMPLE, show_rollout
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


class Samples:
    """Keeps and lists the samples of one run. `tokenizer`: samples are kept as its text, without one as token ids."""

    def __init__(self, journal: Journal) -> None:
        self.tokenizer: Tokenizer | None = None
        self._journal = journal
        self._sampled = 0

    async def take_over(self) -> None:
        """Read up to which batch an older leader has kept samples."""
        self._sampled = await self._journal.store.samples.newest_batch(self._journal.name)

    async def keep(self) -> None:
        """Keep samples of the steps that were trained since the last call. Raises `NotLeader`, `DataLost`.

        Call it before payloads are freed.
        """
        journal = self._journal
        most = journal.config.history.samples_per_step
        if not most:
            return
        for step, made in find_unsampled(journal.state, self._sampled):
            samples = await self._take(step, made, most)
            raw = encode_samples(StepSamples(made.entry, samples))
            with journal.recording_loss():
                await journal.store.samples.write(journal.name, journal.token, step, made.entry, raw)
            self._sampled = max(self._sampled, made.entry)

    async def _take(self, step: int, made: RecordedBatch, most: int) -> list[Sample]:
        """Choose and read the samples of a step. Groups whose bytes are gone have none."""
        journal = self._journal
        store, seed = journal.store, [journal.config.seed, made.generation, step]
        entries = await store.groups.read_entries(journal.name, made.numbers.tolist())
        if not entries:
            return []
        means = np.array([float(entry.values["reward_mean"]) for entry in entries])
        rollouts = np.array([int(entry.values["rollouts"]) for entry in entries])
        reasons: dict[int, list[Why]] = {}
        for position, why in choose_groups(means, rollouts, most, seed):
            reasons.setdefault(entries[position].number, []).append(why)
        samples: list[Sample] = []
        for number, wanted in reasons.items():  # one by one: a group may have 64 MB
            try:
                fetched = await fetch_groups(store, journal.name, [number], journal.state.pool.columns)
            except SpillAway as error:
                logger.warning("no sample is kept run=%s step=%d: %s", journal.name, step, error.detail)
                continue
            if number in fetched.groups:
                group, label = fetched.groups[number], fetched.entries[0].strings.group_id
                samples += await asyncio.to_thread(self._show, step, label, group, wanted, [*seed, number])
        return samples

    def _show(self, step: int, group_id: str, group: Group, reasons: list[Why], seed: list[int]) -> list[Sample]:
        reasons = reasons[: group.rollouts]
        places = choose_rollouts(group.rewards, reasons, seed)
        return [
            Sample(
                **msgspec.structs.asdict(show_rollout(group, place, self.tokenizer, SAMPLE)),
                step=step,
                why=why,
                group_id=group_id,
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
