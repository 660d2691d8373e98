"""Windows of samples that stages with different micro-batch sizes cut into whole micro-batches.

The stages of a producer (rollout, reference logprobs, old logprobs) each compute in micro-batches of their own size,
in samples (rollouts). Passing single micro-batches from one to the next leaves a partial one at every step. Instead,
samples are collected to a window that is a multiple of every size:

    add(batch) ... -> Window -> micro-batches of each stage -> split(results) by the batches that were added

Stages may take every sample several times. `sample_repeat` s repeats each sample in its place, `batch_repeat` r
repeats the batch behind itself: a, b with s = r = 2 become a a b b a a b b. A window has the least number W of samples
for which W·s·r is a multiple of every size.

A batch is never cut, because its results are of one version of the weights. Batches leave in order. If they do not add
up to W, they are collected to a multiple of it: of k samples each to lcm(k, W), at most `MAX_WINDOWS` times W. Only
batches that leave at that bound, at the end of input (`flush`) or at a step limit have a shorter last micro-batch.

Time model, with an example: docs/packing.md#micro-batches-of-several-stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from replaybuf.errors import Invalid

T = TypeVar("T")
R = TypeVar("R")

MAX_WINDOWS = 8
"""Batches that do not add up to a multiple of W leave at so many times W."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """Samples of whole batches: `batches[i]` holds those of the i-th batch added, repeated."""

    batches: tuple[tuple[T, ...], ...]

    @property
    def samples(self) -> list[T]:
        """All samples, in the order of the batches."""
        return [sample for batch in self.batches for sample in batch]

    def split(self, results: Sequence[R]) -> list[list[R]]:
        """Split one result per sample by batches. Raises `Invalid` for another number of results."""
        expected = sum(len(batch) for batch in self.batches)
        if len(results) != expected:
            detail = f"a stage returned {len(results)} results for {expected} samples"
            raise Invalid(detail, name="results", value=len(results), bound=expected)
        rest = iter(results)
        return [[next(rest) for _ in batch] for batch in self.batches]


class Aggregator(Generic[T]):
    """Collects batches to one or several whole windows of samples.

    `held` samples wait: 0 <= held < window if batches of one size divide it, else < MAX_WINDOWS * window. Call `flush`
    after the last batch. With a `step_limit`, the batch with that number is the last one and takes everything along.
    """

    def __init__(
        self, sizes: Sequence[int], *, sample_repeat: int = 1, batch_repeat: int = 1, step_limit: int | None = None
    ) -> None:
        """Take the micro-batch sizes of all stages, in samples.

        `step_limit`: number of batches to come; None = until `flush`. Raises `Invalid` without sizes, or for a number
        below 1.
        """
        self.window = window_samples(sizes, sample_repeat, batch_repeat)
        if step_limit is not None:
            _check_positive("step_limit", step_limit)
        self.step_limit = step_limit
        self.steps = 0
        self.held = 0
        self._repeats = (sample_repeat, batch_repeat)
        self._batches: list[tuple[T, ...]] = []

    def add(self, batch: Sequence[T]) -> Window[T] | None:
        """Add one batch; return everything held if that is whole windows, or at the bound, or with the last step.

        Raises `Invalid` after the step limit.
        """
        if self.steps == self.step_limit:
            detail = f"batch {self.steps + 1} was added; the last step is {self.step_limit}"
            raise Invalid(detail, name="step_limit", value=self.steps + 1, bound=self.step_limit)
        self.steps += 1
        self._batches.append(repeated(batch, *self._repeats))
        self.held += len(batch)
        whole = self.held > 0 and self.held % self.window == 0
        full = whole or self.held >= MAX_WINDOWS * self.window or self.steps == self.step_limit
        return self.flush() if full else None

    def flush(self) -> Window[T] | None:
        """Return everything held; None if that is nothing."""
        batches, self._batches, self.held = tuple(self._batches), [], 0
        return Window(batches) if batches else None


def window_samples(sizes: Sequence[int], sample_repeat: int = 1, batch_repeat: int = 1) -> int:
    """Return the least number of samples that, repeated, is a multiple of all micro-batch sizes.

    Raises `Invalid` if a size or a repeat is below 1.
    """
    if not sizes or min(sizes) < 1:
        detail = f"micro-batch sizes are {list(sizes)}; at least one is needed, each at least 1"
        raise Invalid(detail, name="micro_batch", value=list(sizes), bound=1)
    _check_positive("sample_repeat", sample_repeat)
    _check_positive("batch_repeat", batch_repeat)
    multiple = math.lcm(*sizes)
    return multiple // math.gcd(multiple, sample_repeat * batch_repeat)


def repeated(batch: Sequence[T], sample_repeat: int = 1, batch_repeat: int = 1) -> tuple[T, ...]:
    """Repeat each sample in its place, then the whole batch: a, b by 2 and 2 gives a a b b a a b b."""
    return tuple(sample for sample in batch for _ in range(sample_repeat)) * batch_repeat


def chunks(samples: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut samples into micro-batches of `size`; the last one may be shorter. Raises `Invalid` below 1."""
    _check_positive("micro_batch", size)
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise Invalid(f"{name} is {value}; it must be at least 1", name=name, value=value, bound=1)
