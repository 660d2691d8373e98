"""Rollouts that stay readable after their group is freed: as they are stored, and the answer that lists them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, field

from replaybuf.wire.contract import Answer

Why: TypeAlias = Literal["best", "worst", "chance"]
Pieces: TypeAlias = Annotated[
    list[str | list[int]],
    Meta(description="One piece, or the start and the end: text if the service has a tokenizer, else token ids."),
]


class ShownRollout(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """One rollout, of which long texts are cut in the middle. `place` in its group counts from 0.

    `answer`: the right one, if the group's metadata has it.
    """

    place: int
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)
    advantage: float | None = None
    finish_reason: str | None = None
    prompt: Pieces
    prompt_tokens: int
    completion: Pieces
    completion_tokens: int
    answer: str | None = None


class Sample(ShownRollout, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout of a trained step that stays readable, and `why` it was chosen."""

    step: int
    why: Why
    group_id: str
    prompt_id: str
    prompt_index: int | None = None
    adapter: str = ""
    policy_version: int


class StepSamples(msgspec.Struct, frozen=True):
    """Samples of one step as they are stored. `entry`: ledger entry of the batch that they are from."""

    entry: int
    samples: list[Sample]


class SampleList(Answer, frozen=True, kw_only=True):
    """Samples of trained steps, newest step first. `next`: the `before` of the next page, None on the last one.

    `steps`: how many steps have samples; `oldest`: the oldest of them; `samples_per_step`: of the configuration.
    """

    samples: list[Sample]
    next: int | None
    steps: int
    oldest: int | None = None
    samples_per_step: int


encode_samples = msgspec.msgpack.Encoder().encode
decode_samples = msgspec.msgpack.Decoder(StepSamples).decode
