"""Workload of a simulation: speeds, lengths, failures, difficulty, and the groups drawn from them.

A group is a function of (seed, prompt index, attempt) alone. So all strategies of a study get the same prompts,
lengths, rewards and failures, in whatever order they generate them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from replaybuf.errors import Invalid
from replaybuf.kernel.rows.index import ENTRY
from replaybuf.kernel.strategy.advantages import advantages
from replaybuf.wire.config import MAX_RANKS, RunConfig

Lengths = npt.NDArray[np.int32]

DEFAULT_GROUP_SIZE = 8
"""Rollouts per group if the run configuration has no group_size."""

BLOCK = 1024
"""Prompts drawn at a time."""

LONGEST_S = 366 * 86400.0
_BYTES_PER_TOKEN = 9
"""Id, logprob and mask of a token in a frame; the header is small."""
_COMMON, _FIRST_ATTEMPT = 0, 1

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_S)]
Share = Annotated[float, Meta(ge=0, le=1)]
Tokens = Annotated[int, Meta(ge=1, le=2**24)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Speeds of producers and trainer, and the shape of groups. The docstring of each field is its help text.

    A group occupies one slot for group_s + token_s * (tokens of its longest completion) while all slots generate; with
    load_share it generates faster while fewer do. A step takes train_s + train_token_s * (tokens of its batch), and
    publish_s more to publish its weights.
    """

    slots: Count = 64
    """Number of groups that all producers together generate at the same time."""
    group_s: Seconds = 1.0
    """Fixed seconds per group: prompt, reward, append."""
    token_s: Seconds = 0.02
    """Seconds per token of the longest completion of a group, added to group_s."""
    load_share: Share = 0.0
    """Share of a group's seconds per token that is due to the other groups when all slots generate, 0 to 1. 0: engines
    are as fast under load as without. 1: they share a fixed speed."""
    prompt_tokens: Tokens = 128
    """Number of tokens of a prompt."""
    length_mean: Annotated[float, Meta(ge=1, le=2**24)] = 1000.0
    """Mean number of tokens of a completion, before length_max applies (log-normal distribution)."""
    length_sigma: Annotated[float, Meta(ge=0, le=4)] = 0.8
    """Standard deviation of log(number of tokens of a completion)."""
    length_shared: Share = 0.5
    """Share of that variance that comes from the prompt, 0 to 1. With 1, all completions of a prompt have one
    length."""
    length_max: Tokens = 3900
    """Maximum number of tokens of a completion; longer completions are truncated."""
    failure_rate: Share = 0.0
    """Share of attempts that fail, 0 to 1; the producer returns the ticket."""
    lost_rate: Share = 0.0
    """Share of attempts that crash, 0 to 1; the ticket expires after the run's tickets.ttl_s."""
    timeout_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] | None = None
    """Maximum seconds per attempt; after that the producer returns the ticket. Default: no limit."""
    solved_mean: Share = 0.5
    """Mean share of correct completions, 0 to 1."""
    solved_spread: Share = 0.5
    """Spread of that share over prompts, 0 to 1 (Beta distribution). 0: equal for all prompts; 1: each prompt is always
    or never solved."""
    train_s: Seconds = 40.0
    """Fixed seconds per training step."""
    train_token_s: Seconds = 0.0
    """Seconds per token of the batch, added to train_s."""
    publish_s: Seconds = 5.0
    """Seconds from the end of a step until the engines have the new weights."""
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 8
    """Number of data-parallel ranks of the trainer."""
    prefetch: bool = True
    """Request the next batch once during training, as the reference trainer does."""
    checkpoint_steps: Count = 10
    """Steps between checkpoints."""
    round_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] | None = None
    """Seconds per simulation round: groups that end in one round arrive together. Default: 1/10 of the time
    that trainer or producers, whichever are faster, take for a step."""

    explicit_fields: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, **fields: Any) -> Workload:
        """Remember which fields the caller sets: a recording must not replace them, even if they equal the default."""
        self = super().__new__(cls)
        object.__setattr__(self, "explicit_fields", frozenset(fields))
        return self


def check_workload(workload: Workload) -> None:
    """Raise `Invalid` for impossible speeds and rates."""
    values = dataclasses.asdict(workload)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Invalid(f"{name} is {value}; it must be finite", name=name, value=value, bound="finite")
    try:
        msgspec.convert(values, Workload)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        bound = message.removeprefix("Expected ").replace("`", "")
        raise Invalid(
            f"{name} is {values[name]}; needed: {bound}", name=name, value=values[name], bound=bound
        ) from None
    if workload.failure_rate + workload.lost_rate >= 1:
        raise Invalid(
            f"failure_rate {workload.failure_rate} and lost_rate {workload.lost_rate} leave no attempt that succeeds; "
            "their sum must be below 1",
            name="failure_rate",
            value=workload.failure_rate + workload.lost_rate,
            bound="below 1",
        )
    if workload.group_s == workload.token_s == 0:
        raise Invalid(
            "group_s and token_s are both 0; generation must take time", name="group_s", value=0, bound="above 0"
        )


def check_prompts(workload: Workload, config: RunConfig) -> None:
    """Raise `Invalid` if no rollout fits behind the prompts."""
    if config.batch.overlong == "reject" and workload.prompt_tokens >= config.batch.seq_len:
        raise Invalid(
            f"prompt_tokens is {workload.prompt_tokens}; batch.seq_len is {config.batch.seq_len}, so every group "
            "would be rejected as overlong",
            name="prompt_tokens",
            value=workload.prompt_tokens,
            bound=config.batch.seq_len,
        )


class Attempt(NamedTuple):
    """One attempt at a group; `fate` is `stored`, `failed`, `timeout` or `lost`.

    It occupies its slot for `duration_s` while all slots generate; `reward_s` of it is after generation.
    """

    prompt_index: int
    number: int
    duration_s: float
    fate: str
    tokens: int
    longest_tokens: int
    entry: bytes
    """One `ENTRY` without versions and arrival."""
    reward_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Attempts at `BLOCK` consecutive prompts; `lengths` [BLOCK, rollouts] tokens."""

    attempts: list[Attempt]
    lengths: Lengths


class Supply:
    """Groups of a workload, drawn on demand."""

    def __init__(self, workload: Workload, config: RunConfig, seed: int) -> None:
        self.workload = workload
        self._seed = seed
        self._config = config
        self._group_size = config.group_size or DEFAULT_GROUP_SIZE
        self._scores: dict[int, tuple[float, float, float]] = {}
        self._blocks: dict[tuple[int, int], Block] = {}

    def attempt(self, prompt_index: int, number: int) -> Attempt:
        """Return attempt `number` (from 1) at a prompt."""
        return self._block(prompt_index // BLOCK, number).attempts[prompt_index % BLOCK]

    def entries(self, attempts: list[Attempt]) -> npt.NDArray[Any]:
        """Return the index entries of these attempts, `ENTRY` [n], without versions and arrival."""
        return np.frombuffer(bytearray(b"".join(attempt.entry for attempt in attempts)), ENTRY)

    def lengths(self, prompt_index: int, number: int) -> Lengths:
        """Return the tokens of each rollout, [rollouts]."""
        rows: Lengths = self._block(prompt_index // BLOCK, number).lengths[prompt_index % BLOCK]
        return rows

    def feedback(self, step: int) -> dict[str, Any] | None:
        """Return the recorded feedback of a step; None if there is none."""
        return None

    @property
    def tokens_per_group(self) -> float:
        """Mean tokens of a group, over the first prompts."""
        return float(np.mean([attempt.tokens for attempt in self._block(0, _FIRST_ATTEMPT).attempts]))

    @property
    def duration_s(self) -> float:
        """Mean seconds that a group occupies its slot, over the first prompts."""
        return float(np.mean([attempt.duration_s for attempt in self._block(0, _FIRST_ATTEMPT).attempts]))

    def _block(self, block: int, number: int) -> Block:
        key = block, number
        drawn = self._blocks.get(key)
        if drawn is None:
            drawn = self._blocks[key] = self._draw(block, number)
        return drawn

    def _rng(self, block: int, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, block, stream])))

    def _draw(self, block: int, number: int) -> Block:
        """Draw a block: one stream for the prompts, one more for each attempt."""
        w, size = self.workload, self._group_size
        common, own_rng = self._rng(block, _COMMON), self._rng(block, number)
        of_prompt = common.standard_normal((BLOCK, 1))
        solved = _solved(common, w)
        of_rollout = own_rng.standard_normal((BLOCK, size))
        z = math.sqrt(w.length_shared) * of_prompt + math.sqrt(1 - w.length_shared) * of_rollout
        drawn = np.rint(np.exp(math.log(w.length_mean) - w.length_sigma**2 / 2 + w.length_sigma * z))
        completions = np.clip(drawn, 1, w.length_max).astype(np.int32)
        right = (own_rng.random((BLOCK, size)) < solved[:, None]).sum(axis=1)
        entries = np.zeros(BLOCK, ENTRY)
        entries["truncated"] = (drawn > w.length_max).sum(axis=1)
        scores = np.array([self._score(count) for count in right.tolist()])
        for column, name in enumerate(("reward_mean", "reward_std", "advantage_abs_mean")):
            entries[name] = scores[:, column]
        longest, none = completions.max(axis=1), np.zeros(BLOCK)
        return self._finish(block, number, entries, w.prompt_tokens + completions, longest, none, own_rng)

    def _finish(
        self,
        block: int,
        number: int,
        entries: npt.NDArray[Any],
        lengths: Lengths,
        longest: npt.NDArray[np.integer | np.floating],
        reward: npt.NDArray[np.floating],
        rng: np.random.Generator,
    ) -> Block:
        """Fill in sizes and durations, and draw the fates.

        `longest`: tokens that the time of a group follows, of which `reward` follow generation.
        """
        w = self.workload
        if self._config.batch.overlong == "truncate":
            lengths = np.minimum(lengths, self._config.batch.seq_len)
        entries["prompt_index"] = block * BLOCK + np.arange(BLOCK)
        entries["rollouts"] = lengths.shape[1]
        entries["tokens"] = lengths.sum(axis=1)
        entries["frame_bytes"] = _BYTES_PER_TOKEN * entries["tokens"]
        entries["longest_tokens"] = lengths.max(axis=1)
        durations = w.group_s + w.token_s * longest
        chance = rng.random(BLOCK)
        fates = np.full(BLOCK, "stored", object)
        fates[chance < w.failure_rate + w.lost_rate] = "failed"
        fates[chance < w.lost_rate] = "lost"
        if w.timeout_s is not None:
            fates[(durations > w.timeout_s) & (fates != "lost")] = "timeout"
            durations = np.minimum(durations, w.timeout_s)
        rewards = np.minimum(w.group_s + w.token_s * reward, durations)
        raw, size = entries.tobytes(), ENTRY.itemsize
        columns = (
            entries["prompt_index"].tolist(),
            itertools.repeat(number, BLOCK),
            durations.tolist(),
            fates.tolist(),
            entries["tokens"].tolist(),
            entries["longest_tokens"].tolist(),
            [raw[start : start + size] for start in range(0, len(raw), size)],
            rewards.tolist(),
        )
        return Block([Attempt(*values) for values in zip(*columns, strict=True)], lengths)

    def _score(self, right: int) -> tuple[float, float, float]:
        """Return reward mean, reward deviation and mean |advantage| of a group with so many correct rollouts."""
        if right not in self._scores:
            rewards = np.repeat([1.0, 0.0], [right, self._group_size - right])
            spread = float(np.abs(advantages(self._config.advantage, rewards)).mean())
            self._scores[right] = float(rewards.mean()), float(rewards.std()), spread
        return self._scores[right]


def _solved(rng: np.random.Generator, w: Workload) -> npt.NDArray[np.float64]:
    """Draw the share of correct completions of each prompt: Beta with variance mean·(1-mean)·spread."""
    mean, spread = w.solved_mean, w.solved_spread
    if spread == 0 or mean in (0, 1):
        return np.full(BLOCK, mean)
    if spread == 1:
        return (rng.random(BLOCK) < mean).astype(np.float64)
    weight = 1 / spread - 1
    return rng.beta(mean * weight, (1 - mean) * weight, BLOCK)
