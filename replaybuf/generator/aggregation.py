"""Stages with different micro-batch sizes, joined at their least common multiple.

A producer's stages (rollout, reference logprobs, old logprobs) each compute in micro-batches of their own size, in
samples (rollouts). Feeding one from another by single micro-batches leaves a partial micro-batch at every seam.
Instead samples are collected to a window of lcm(sizes) samples, which every stage can cut into whole micro-batches:

    add(batch) ... -> Window -> compute(window, micro_batch, stage) -> results by the batches that were added

A stage that takes every sample several times (several completions of a prompt, several passes) says so: `sample_repeat`
s repeats each sample in its place, `batch_repeat` r repeats the batch behind itself, so that of a, b with s = r = 2 the
stages see a a b b a a b b. A window is then the least number W of samples for which W·s·r is a multiple of every size.

A batch that was added is never cut (its results are of one version of the weights): it leaves whole, in the order in
which it came. Where batches do not add up to W they are collected until they add up to a multiple of it: of k samples
each to lcm(k, W), at most `MOST_WINDOWS` times W. Only what leaves at that bound, at the end of input (`flush`) or at a
step limit has a shorter last micro-batch.

Time model, with an example: docs/packing.md#micro-batches-of-several-stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from replaybuf.errors import Invalid

T = TypeVar("T")
R = TypeVar("R")

MOST_WINDOWS = 8
"""So many times W are held for batches that do not add up to a multiple of it; then they leave as they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """Samples of whole batches, one after another: `batches[i]` holds those of the i-th batch added, repeated."""

    batches: tuple[tuple[T, ...], ...]

    @property
    def samples(self) -> list[T]:
        """All samples, in order: those of batch a before those of batch b."""
        return [sample for batch in self.batches for sample in batch]

    def split(self, results: Sequence[R]) -> list[list[R]]:
        """Cut one result per sample back to the batches. Raises `Invalid` where their number is another."""
        expected = sum(len(batch) for batch in self.batches)
        if len(results) != expected:
            raise Invalid(
                f"a stage returned {len(results)} results for {expected} samples",
                name="results",
                value=len(results),
                bound=expected,
            )
        rest = iter(results)
        return [[next(rest) for _ in batch] for batch in self.batches]


class Aggregator(Generic[T]):
    """Collects batches until a whole window of samples is there, or several whole ones.

    `held` samples wait here: 0 <= held < window where batches of one size divide it, else < MOST_WINDOWS * window. A
    caller that has nothing more to add must `flush`, or they stay.
    With a `step_limit` the batch of that number, the last one, takes everything along.
    """

    def __init__(
        self, sizes: Sequence[int], *, sample_repeat: int = 1, batch_repeat: int = 1, step_limit: int | None = None
    ) -> None:
        """Take the micro-batch sizes of all stages, in samples.

        `step_limit`: number of batches to come; None = until `flush`. Raises `Invalid` where there is no size, or a
        number is below 1.
        """
        if step_limit is not None and step_limit < 1:
            raise Invalid(
                f"step_limit is {step_limit}; it must be at least 1", name="step_limit", value=step_limit, bound=1
            )
        self._repeats = (sample_repeat, batch_repeat)
        self.window = window_samples(sizes, sample_repeat, batch_repeat)
        self.step_limit = step_limit
        self.steps = 0
        self.held = 0
        self._batches: list[tuple[T, ...]] = []

    def add(self, batch: Sequence[T]) -> Window[T] | None:
        """Add one batch; return everything held when that is whole windows, or at the bound, or with the last step.

        Raises `Invalid` behind the step limit.
        """
        if self.steps == self.step_limit:
            raise Invalid(
                f"batch {self.steps + 1} was added; the last step is {self.step_limit}",
                name="step_limit",
                value=self.steps + 1,
                bound=self.step_limit,
            )
        self.steps += 1
        self._batches.append(repeated(batch, *self._repeats))
        self.held += len(batch)
        whole = self.held > 0 and self.held % self.window == 0
        leaves = whole or self.held >= MOST_WINDOWS * self.window or self.steps == self.step_limit
        return self.flush() if leaves else None

    def flush(self) -> Window[T] | None:
        """Return what is held, however little; None where there is nothing."""
        batches, self._batches, self.held = tuple(self._batches), [], 0
        return Window(batches) if batches else None


def window_samples(sizes: Sequence[int], sample_repeat: int = 1, batch_repeat: int = 1) -> int:
    """Return the least number of samples that, repeated, is a multiple of all micro-batch sizes.

    Raises `Invalid` where a size or a repeat is below 1.
    """
    if not sizes or min(sizes) < 1:
        raise Invalid(
            f"micro-batch sizes are {list(sizes)}; at least one is needed, each at least 1",
            name="micro_batch",
            value=list(sizes),
            bound=1,
        )
    for name, value in (("sample_repeat", sample_repeat), ("batch_repeat", batch_repeat)):
        if value < 1:
            raise Invalid(f"{name} is {value}; it must be at least 1", name=name, value=value, bound=1)
    multiple = math.lcm(*sizes)
    return multiple // math.gcd(multiple, sample_repeat * batch_repeat)


def repeated(batch: Sequence[T], sample_repeat: int = 1, batch_repeat: int = 1) -> tuple[T, ...]:
    """Repeat each sample in its place, then the whole batch: a, b by 2 and 2 gives a a b b a a b b."""
    return tuple(sample for sample in batch for _ in range(sample_repeat)) * batch_repeat


def chunks(samples: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut samples into micro-batches of `size`, the last one shorter where it must be. Raises `Invalid` below 1."""
    if size < 1:
        raise Invalid(f"micro_batch is {size}; it must be at least 1", name="micro_batch", value=size, bound=1)
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def compute(window: Window[T], micro_batch: int, stage: Callable[[Sequence[T]], Sequence[R]]) -> list[list[R]]:
    """Run one stage over a window in micro-batches; return its results by batch.

    `stage` returns one result per sample, in order. Raises `Invalid` where it returns another number, and for a
    `micro_batch` below 1.
    """
    results = [result for chunk in chunks(window.samples, micro_batch) for result in stage(chunk)]
    return window.split(results)
