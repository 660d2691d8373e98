"""Completions as an engine returned them, for every API: checks, order, and conversion to columns."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np

from replaybuf.errors import counted
from replaybuf.generator.engines.protocol import ABORTED
from replaybuf.wire.group import Float32s, Int32s
from replaybuf.wire.group_check import LOGPROB_TOLERANCE

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
ABSENT_LOGPROB = -9999.0
"""vLLM writes this for a missing logprob and for minus infinity."""


class Span(msgspec.Struct, frozen=True):
    """Completion tokens `start` to `end` (exclusive) were sampled by the weights with the label `version`."""

    version: int | str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One completion: `logprobs` in nats, one per token; `spans` None where the server reports no versions."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    spans: list[Span] | None = None

    def check(self) -> None:
        """Raise `ValueError` where lengths do not fit together."""
        tokens = len(self.token_ids)
        if not tokens and self.finish_reason != ABORTED:
            raise ValueError("a choice without token_ids")
        if len(self.logprobs) != tokens:
            raise ValueError(f"{counted(len(self.logprobs), 'logprob')} for {counted(tokens, 'token')}")
        if tokens and self.spans is not None and not _cover(self.spans, tokens):
            raise ValueError(
                f"weight_versions {[(span.start, span.end) for span in self.spans]} for {counted(tokens, 'token')}"
            )


class _Indexed(Protocol):
    @property
    def index(self) -> int: ...


I = TypeVar("I", bound=_Indexed)  # noqa: E741


def in_order(choices: Sequence[I], n: int) -> list[I]:
    """Sort choices by index. Raises `ValueError` unless the indexes are 0 to n - 1."""
    ordered = sorted(choices, key=lambda choice: choice.index)
    if len(ordered) != n:
        raise ValueError(f"{counted(len(ordered), 'choice')}; {n} were requested")
    indexes = [choice.index for choice in ordered]
    if indexes != list(range(n)):
        raise ValueError(f"choices of index {indexes}; {n} were requested")
    return ordered


def token_ids(choices: Sequence[Choice]) -> Int32s:
    """Return the token ids of all choices, int32 [C]."""
    ids: Int32s = _joined([choice.token_ids for choice in choices], "i")
    return ids


def logprobs(choices: Sequence[Choice]) -> Float32s:
    """Return the logprobs of all choices, float32 [C]. Raises `ValueError` where one is out of bounds."""
    values = _joined([choice.logprobs for choice in choices], "d")
    if len(values):
        low, high = values.min(), values.max()
        if not ABSENT_LOGPROB < low <= high <= LOGPROB_TOLERANCE:
            raise ValueError(f"logprobs from {low:g} to {high:g}; each must be above {ABSENT_LOGPROB:g} and at most 0")
    narrow: Float32s = values.astype(np.float32)
    return narrow


def uniform_spans(lengths: Int32s, version: int) -> Int32s:
    """Return the spans, int32 [k, 4], of completions that one version covers; empty completions have none."""
    rollouts = np.flatnonzero(lengths)
    spans = np.zeros((len(rollouts), 4), np.int32)
    spans[:, 0] = rollouts
    spans[:, 1] = version
    spans[:, 3] = lengths[rollouts]
    return spans


def _cover(spans: Sequence[Span], tokens: int) -> bool:
    """Return whether spans cover all tokens without a gap or overlap."""
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            return False
        end = span.end
    return end == tokens


def _joined(lists: Sequence[Sequence[float]], code: str) -> Any:
    # A third of the time of `np.fromiter` over all lists: a group has thousands of numbers.
    packed = [struct.pack(f"={len(values)}{code}", *values) for values in lists]
    return np.frombuffer(b"".join(packed), code)
