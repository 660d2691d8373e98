"""How adapters share the steps of one trainer: whose turn it is, and how far each is with its own batch.

Pure. With B = `groups_per_batch` of an adapter and `used` = its groups in the batches of the surviving history::

    own step = used // B        given to the batch of that step = used % B        lacking = B - used % B

A batch of the run takes a portion of one adapter after the other, each within what is left of the token budget and no
more than the adapter lacks: no portion crosses the end of an own step. Where the budget ends a portion, or leaves no
room for one that would be ready, that adapter is the first of the next batch. So each one that is ready is served at
the latest when those before it have each completed an own step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.wire.run_status import Progress


class Rotation(msgspec.Struct, frozen=True, array_like=True):
    """Whose turn is next ("" = the first of all, by name); groups used in the surviving history, by adapter."""

    next: str = ""
    used: dict[str, int] = {}

    def order(self, names: Iterable[str]) -> list[str]:
        """Name the adapters in their turns."""
        ordered = sorted(names)
        start = next((at for at, name in enumerate(ordered) if name >= self.next), 0)
        return ordered[start:] + ordered[:start]

    def progress(self, adapter: str, groups_per_batch: int) -> Progress:
        """Tell how far an adapter is."""
        return Progress(*divmod(self.used.get(adapter, 0), groups_per_batch), groups_per_batch)

    def after(self, given: Mapping[str, int], following: str) -> Rotation:
        """Go on behind a batch that has so many groups of each adapter; `following` has the next turn."""
        return Rotation(
            following, self.used | {name: self.used.get(name, 0) + groups for name, groups in given.items()}
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterShare:
    """What an adapter gives to a batch: rows of its groups int64 [n], their weights float32 [n] or None, tokens."""

    rows: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None
    tokens: int


Offer = Callable[[str, int | None, int], AdapterShare | None]
"""Ask an adapter for a portion of at most so many tokens (None = no bound) and groups; None = it has none ready."""


def share(
    turns: Rotation, batch_sizes: Mapping[str, int], tokens: int | None, offer: Offer
) -> tuple[dict[str, AdapterShare], str]:
    """Take the portions of one batch of at most `tokens`; return them and whose turn is next.

    `batch_sizes` >= 1: groups per own batch of each adapter. No portion at all: nobody is ready.
    """
    names = turns.order(batch_sizes)
    portions: dict[str, AdapterShare] = {}
    room, cut, following = tokens, "", turns.next
    for name in names:
        lacking = batch_sizes[name] - turns.progress(name, batch_sizes[name]).groups
        portion = offer(name, room, lacking) if room != 0 else None
        if portion:
            portions[name] = portion
            following = names[(names.index(name) + 1) % len(names)]
            room = None if room is None else room - portion.tokens
        if not cut and (len(portion.rows) < lacking if portion else _lacked_room(name, room, tokens, lacking, offer)):
            cut = name
    return portions, cut or following


def _lacked_room(name: str, room: int | None, tokens: int | None, lacking: int, offer: Offer) -> bool:
    """Say whether an adapter that had nothing for what is left of the budget is ready for the whole of it."""
    return room != tokens and offer(name, tokens, lacking) is not None
