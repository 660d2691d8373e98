"""Rotation of adapters: the order in which they share the batches of one trainer, and the progress of each.

With B = `groups_per_batch` of an adapter and g = groups given to its current step, 0 <= g < B::

    a batch takes min(B - g, groups that the rest of the token budget holds) groups of each adapter in turn
    g + groups taken = B  completes the step of the adapter

So a share never crosses the end of an adapter's step. If the budget cuts a share or leaves no space for it, that
adapter is first in the next batch. A ready adapter thus waits while the others complete at most one step each.

A run without LoRA has the one adapter `""`, and each of its batches completes a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.kernel.rows.groups import Numbers
from replaybuf.wire.ledger import AdapterStep


class AdapterProgress(msgspec.Struct, frozen=True, array_like=True):
    """Completed `steps` of an adapter, `groups` given to its current step, uses of its groups that no rewind voided."""

    steps: int = 0
    groups: int = 0
    used: int = 0

    def after(self, part: AdapterStep) -> AdapterProgress:
        """Return the progress after a batch that holds this part."""
        used = self.used + part.groups
        if part.completed:
            return AdapterProgress(self.steps + 1, 0, used)
        return AdapterProgress(self.steps, self.groups + part.groups, used)


class Rotation(msgspec.Struct, frozen=True, array_like=True):
    """Adapter with the next turn ("" = the first by name), and the progress of each adapter."""

    next: str = ""
    adapters: dict[str, AdapterProgress] = {}

    def order(self, names: Iterable[str]) -> list[str]:
        """Sort the adapters by their turns."""
        ordered = sorted(names)
        start = next((at for at, name in enumerate(ordered) if name >= self.next), 0)
        return ordered[start:] + ordered[:start]

    def progress(self, adapter: str) -> AdapterProgress:
        """Return the progress of an adapter."""
        return self.adapters.get(adapter, AdapterProgress())

    def after(self, parts: Mapping[str, AdapterStep], following: str) -> Rotation:
        """Return the rotation after a batch with these parts; `following` has the next turn."""
        progress = {name: self.progress(name).after(part) for name, part in parts.items()}
        return Rotation(following, self.adapters | progress)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterShare:
    """Groups of one adapter in a batch: numbers int64 [n], weights float32 [n] or None, sum of tokens."""

    numbers: Numbers
    weights: npt.NDArray[np.float32] | None
    tokens: int


Offer = Callable[[str, int | None, int | None], AdapterShare | None]
"""Ask an adapter for at most so many tokens and groups (None = unbounded); None = the adapter is not ready.

`share_batch` may ask an adapter twice, the second time only to learn whether it is ready.
"""


def share_batch(
    rotation: Rotation, batch_sizes: Mapping[str, int | None], tokens: int | None, offer: Offer
) -> tuple[dict[str, AdapterShare], str]:
    """Take the shares of one batch of at most `tokens`; return them and the adapter with the next turn.

    `batch_sizes`: groups per step of each adapter, >= 1; None = only tokens bound it. No shares = no adapter is ready.
    """
    names = rotation.order(batch_sizes)
    shares: dict[str, AdapterShare] = {}
    left, cut, following = tokens, "", rotation.next
    for name in names:
        size = batch_sizes[name]
        missing = None if size is None else size - rotation.progress(name).groups
        share = offer(name, left, missing) if left != 0 else None
        if share:
            shares[name] = share
            following = names[(names.index(name) + 1) % len(names)]
            left = None if left is None else left - share.tokens
            is_cut = missing is not None and len(share.numbers) < missing
        elif left == tokens or cut:
            is_cut = False
        else:  # ask again: would the share fit the whole budget, though not the rest of it?
            is_cut = offer(name, tokens, missing) is not None
        if is_cut and not cut:
            cut = name
    return shares, cut or following
