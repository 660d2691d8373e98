"""Windows of samples that stages with different micro-batch sizes cut into whole micro-batches.

The stages of a group (reference logprobs, old logprobs) each compute in micro-batches of their own size, in samples
(rollouts). Passing single micro-batches from one to the next leaves a partial one at every step. Instead, samples are
collected to a window that is a multiple of every size:

    add(group, samples) ... -> Window -> micro-batches of each stage -> split(results) by the groups that were added

A window has the least number W of samples that is a multiple of every size.

A group is never cut, because its results are of one version of the weights. Groups leave in order. If they do not add
up to W, they are collected to a multiple of it: of k samples each to lcm(k, W), at most `MAX_WINDOWS` times W. Only
groups that leave at that bound or because no other comes (`flush`) have a shorter last micro-batch.

Time model, with an example: docs/packing.md#micro-batches-of-several-stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Generic, TypeVar

from replaybuf.errors import Invalid

G = TypeVar("G")
T = TypeVar("T")
R = TypeVar("R")

MAX_WINDOWS = 8
"""Groups that do not add up to a multiple of W leave at so many times W."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window(Generic[G, T]):
    """Samples of whole groups: `samples[i]` are those of `groups[i]`."""

    groups: Sequence[G]
    samples: Sequence[Sequence[T]]

    def micro_batches(self, size: int | None) -> list[Sequence[T]]:
        """Cut the samples into micro-batches of `size`, the last one may be shorter; None = one per group."""
        if size is None:
            return list(self.samples)
        flat = [sample for samples in self.samples for sample in samples]
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def split(self, results: Sequence[R]) -> list[list[R]]:
        """Split one result per sample by groups."""
        rest = iter(results)
        return [[next(rest) for _ in samples] for samples in self.samples]


class Aggregator(Generic[G, T]):
    """Collects groups to one or several whole windows of samples.

    `held` samples wait: 0 <= held < window if groups of one size divide it, else < MAX_WINDOWS * window. Call `flush`
    if no other group comes that could fill it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Take the micro-batch sizes of all stages, in samples. Raises `Invalid` without sizes, or for one below 1."""
        if not sizes or min(sizes) < 1:
            detail = f"micro-batch sizes are {list(sizes)}; at least one is needed, each at least 1"
            raise Invalid(detail, name="micro_batch", value=list(sizes), bound=1)
        self.window = math.lcm(*sizes)
        self.held = 0
        self._groups: list[tuple[G, Sequence[T]]] = []

    def add(self, group: G, samples: Sequence[T]) -> Window[G, T] | None:
        """Add one group; return everything held if that is whole windows, or at the bound."""
        self._groups.append((group, samples))
        self.held += len(samples)
        whole = self.held > 0 and self.held % self.window == 0
        return self.flush() if whole or self.held >= MAX_WINDOWS * self.window else None

    def flush(self) -> Window[G, T] | None:
        """Return everything held; None if that is nothing."""
        groups, self._groups, self.held = self._groups, [], 0
        return Window([group for group, _ in groups], [samples for _, samples in groups]) if groups else None
