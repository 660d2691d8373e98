"""Windows of samples that stages with different micro-batch sizes cut into whole micro-batches.

The stages of a producer (rollout, reference logprobs, old logprobs) each compute in micro-batches of their own size,
in samples (rollouts). Passing single micro-batches from one to the next leaves a partial one at every step. Instead,
samples are collected to a window that is a multiple of every size:

    add(batch) ... -> Window -> micro-batches of each stage -> split(results) by the batches that were added

A window has the least number W of samples that is a multiple of every size.

A batch is never cut, because its results are of one version of the weights. Batches leave in order. If they do not add
up to W, they are collected to a multiple of it: of k samples each to lcm(k, W), at most `MAX_WINDOWS` times W. Only
batches that leave at that bound or at the end of input (`flush`) have a shorter last micro-batch.

Time model, with an example: docs/packing.md#micro-batches-of-several-stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from replaybuf.errors import Invalid, counted

T = TypeVar("T")
R = TypeVar("R")

MAX_WINDOWS = 8
"""Batches that do not add up to a multiple of W leave at so many times W."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """Samples of whole batches: `batches[i]` holds those of the i-th batch added."""

    batches: tuple[tuple[T, ...], ...]

    @property
    def samples(self) -> list[T]:
        """All samples, in the order of the batches."""
        return [sample for batch in self.batches for sample in batch]

    def split(self, results: Sequence[R]) -> list[list[R]]:
        """Split one result per sample by batches. Raises `Invalid` for another number of results."""
        expected = sum(len(batch) for batch in self.batches)
        if len(results) != expected:
            detail = f"a stage returned {counted(len(results), 'result')} for {counted(expected, 'sample')}"
            raise Invalid(detail, name="results", value=len(results), bound=expected)
        rest = iter(results)
        return [[next(rest) for _ in batch] for batch in self.batches]


class Aggregator(Generic[T]):
    """Collects batches to one or several whole windows of samples.

    `held` samples wait: 0 <= held < window if batches of one size divide it, else < MAX_WINDOWS * window. Call `flush`
    after the last batch.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Take the micro-batch sizes of all stages, in samples. Raises `Invalid` without sizes, or for one below 1."""
        self.window = window_samples(sizes)
        self.held = 0
        self._batches: list[tuple[T, ...]] = []

    def add(self, batch: Sequence[T]) -> Window[T] | None:
        """Add one batch; return everything held if that is whole windows, or at the bound."""
        self._batches.append(tuple(batch))
        self.held += len(batch)
        whole = self.held > 0 and self.held % self.window == 0
        return self.flush() if whole or self.held >= MAX_WINDOWS * self.window else None

    def flush(self) -> Window[T] | None:
        """Return everything held; None if that is nothing."""
        batches, self._batches, self.held = tuple(self._batches), [], 0
        return Window(batches) if batches else None


def window_samples(sizes: Sequence[int]) -> int:
    """Return the least number of samples that is a multiple of all micro-batch sizes. Raises `Invalid` below 1."""
    if not sizes or min(sizes) < 1:
        detail = f"micro-batch sizes are {list(sizes)}; at least one is needed, each at least 1"
        raise Invalid(detail, name="micro_batch", value=list(sizes), bound=1)
    return math.lcm(*sizes)


def chunks(samples: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut samples into micro-batches of `size`; the last one may be shorter. Raises `Invalid` below 1."""
    if size < 1:
        raise Invalid(f"micro_batch is {size}; it must be at least 1", name="micro_batch", value=size, bound=1)
    for start in range(0, len(samples), size):
        yield samples[start : start + size]
