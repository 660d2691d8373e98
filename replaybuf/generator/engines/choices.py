"""The choices of an answer, whatever API gave them: what makes them usable, and how they become columns."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np

from replaybuf.generator.engines.protocol import ABORTED
from replaybuf.wire.group import Float32s, Int32s

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
ABSENT_LOGPROB = -9999.0
"""What vLLM writes for a logprob it does not have, or for minus infinity."""
_TOLERANCE = 1e-3
"""Rounding may leave the logprob of a certain token so far above 0."""


class Span(msgspec.Struct, frozen=True):
    """Completion tokens `start` to `end` (exclusive) were sampled by the weights labelled `version`."""

    version: int | str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One completion: `logprobs` in nats, one per token; `spans` None where the server does not tell versions."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    spans: list[Span] | None = None

    def flaw(self) -> str | None:
        """Say what makes this choice unusable, beside its numbers; None where nothing does."""
        tokens = len(self.token_ids)
        if not tokens and self.finish_reason != ABORTED:
            return "a choice without token_ids"
        if len(self.logprobs) != tokens:
            return f"{len(self.logprobs)} logprobs for {tokens} tokens"
        if tokens and self.spans is not None and _covered(self.spans) != tokens:
            return f"weight_versions {[(span.start, span.end) for span in self.spans]} for {tokens} tokens"
        return None


class Numbered(Protocol):
    """Whatever of an answer has a place in it."""

    @property
    def index(self) -> int:
        """Its place, from 0."""


N = TypeVar("N", bound=Numbered)


def in_order(choices: Sequence[N], n: int) -> tuple[list[N], str | None]:
    """Sort choices by index; also say what is wrong with their number or indexes, None where nothing is."""
    ordered = sorted(choices, key=lambda choice: choice.index)
    if len(ordered) != n:
        return ordered, f"{len(ordered)} choices; asked for were {n}"
    indexes = [choice.index for choice in ordered]
    if indexes != list(range(n)):
        return ordered, f"choices of index {indexes}; asked for were {n}"
    return ordered, None


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Choices side by side; shapes and types as in `Sample`."""

    completion_ids: Int32s
    completion_lengths: Int32s
    inference_logprobs: Float32s
    finish_reasons: tuple[str | None, ...]


def columns(choices: Sequence[Choice]) -> Columns:
    """Join choices. Raises `ValueError` where a logprob is none."""
    logprobs = _joined([choice.logprobs for choice in choices], "d")
    if len(logprobs):
        low, high = logprobs.min(), logprobs.max()
        if not ABSENT_LOGPROB < low <= high <= _TOLERANCE:
            needed = f"each must be above {ABSENT_LOGPROB:g} and at most 0"
            raise ValueError(f"logprobs from {low:g} to {high:g}; {needed}")
    return Columns(
        completion_ids=_joined([choice.token_ids for choice in choices], "i"),
        completion_lengths=np.array([len(choice.token_ids) for choice in choices], np.int32),
        inference_logprobs=logprobs.astype(np.float32),
        finish_reasons=tuple(choice.finish_reason for choice in choices),
    )


def stamped(lengths: Int32s, version: int) -> Int32s:
    """Return the spans, int32 [k, 4], of completions that one version is answerable for; empty ones have none."""
    rollouts = np.flatnonzero(lengths)
    spans = np.zeros((len(rollouts), 4), np.int32)
    spans[:, 0] = rollouts
    spans[:, 1] = version
    spans[:, 3] = lengths[rollouts]
    return spans


def _covered(spans: Sequence[Span]) -> int:
    """Return how many tokens spans cover from the first on without a gap; -1 where they have one or overlap."""
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            return -1
        end = span.end
    return end


def _joined(lists: Sequence[Sequence[float]], code: str) -> Any:
    # A third of the time of `np.fromiter` over all of them: there are thousands of numbers in a group.
    packed = [struct.pack(f"={len(values)}{code}", *values) for values in lists]
    return np.frombuffer(b"".join(packed), code)
