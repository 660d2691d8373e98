"""Strict shares of sources in `replay`: what each source may have in a batch and in the buffer.

A batch of B groups has the quota q_i of source i, its turns among the first B places of the mix. Without `mix_strict` a
short source gives its places away. With it a batch waits, or stays short by the places that are empty.

Tickets name no source, so producers bring sources in the shares of the prompts. Groups of a source beyond its share of
the buffer would fill the window, and no ticket would ever bring the short source. So admission counts what the scarcest
source can make use of::

    live = min over i of (live groups of i / s_i)

and a source holds at most ceil(s_i * largest window * B) live groups: the newest beyond them are evicted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replaybuf.strategy import BufferView
from replaybuf_strategies.draws import Pieces
from replaybuf_strategies.mixture import turns

BEYOND_SHARE = "beyond_share"


def quotas(shares: Sequence[float], buffer: BufferView) -> npt.NDArray[np.int64]:
    """Return the groups of each source in a full batch [sources]; if tokens bound it, by the mean group."""
    return np.bincount(turns(tuple(shares), full_batch(buffer)), minlength=len(shares))


def full_batch(buffer: BufferView) -> int:
    """Return the groups of a full batch, less those that earlier batches hold for its step; at least 1."""
    budget = buffer.budget
    by_groups = math.inf if budget.groups is None else budget.groups - buffer.groups_given
    mean = max(1.0, buffer.tokens_live / max(1, buffer.groups_live))
    by_tokens = math.inf if budget.tokens is None else budget.tokens / mean
    return max(1, int(min(by_groups, by_tokens)))


def at_most(pieces: Pieces, most: int) -> Pieces:
    """Cut an order after so many positions."""
    for piece in pieces:
        if most <= 0:
            return
        yield piece[:most]
        most -= len(piece)


def live_of(shares: Sequence[float], buffer: BufferView) -> list[int]:
    """Return the live groups of each source of the mix; the last share may be that of all other sources."""
    named = list(buffer.sources_live)
    return named if len(shares) == len(named) else [*named, buffer.groups_live - sum(named)]


def balanced(shares: Sequence[float], buffer: BufferView) -> BufferView:
    """Return the buffer as if it held only what batches in these shares can use."""
    total = sum(shares)
    live = min((count * total / share for count, share in zip(live_of(shares, buffer), shares, strict=True)), default=0)
    part = min(1.0, live / max(1, buffer.groups_live))
    return dataclasses.replace(
        buffer,
        groups_live=int(buffer.groups_live * part),
        tokens_live=int(buffer.tokens_live * part),
        groups_fresh=int(buffer.groups_fresh * part),
        uses_live=int(buffer.uses_live * part),
    )


def beyond(shares: Sequence[float], buffer: BufferView, window: int) -> list[int]:
    """Return how many live groups each source has beyond its share of a window of batches; 0 or less = none."""
    places = window * full_batch(dataclasses.replace(buffer, groups_given=0)) / sum(shares)
    return [count - math.ceil(share * places) for count, share in zip(live_of(shares, buffer), shares, strict=True)]
