"""Builders of groups, configurations, index entries and ledger records, and Hypothesis strategies for groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from replaybuf.kernel.rows.index import ENTRY, NO_PROMPT_INDEX
from replaybuf.kernel.strategy.contract import Budget, BufferView, Groups
from replaybuf.wire.answer.run_status import RunStatus
from replaybuf.wire.batch import BatchMeta
from replaybuf.wire.config import BatchSpec, RunConfig
from replaybuf.wire.contract import Amount, WaitingAnswer
from replaybuf.wire.group import Group, GroupJson, RolloutJson, group_from_json
from replaybuf.wire.ledger import BatchEntry, BatchRecord, ConfigRecord

T = TypeVar("T")

LARGEST_TOKEN = 2**31 - 1

# ---------------------------------------------------------------------- groups


def rollout(**fields: Any) -> RolloutJson:
    """Build a JSON rollout: 2 prompt tokens, 3 completion tokens, reward 1."""
    filled: dict[str, Any] = {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5],
        "inference_logprobs": [-0.25, -0.5, -1.0],
        "reward": 1.0,
    }
    return RolloutJson(**filled | fields)


def wire_group(*rollouts: RolloutJson, **fields: Any) -> GroupJson:
    """Build a JSON group, with two default rollouts if none are given."""
    filled: dict[str, Any] = {"group_id": "g", "prompt_id": "p", "policy_version": 0}
    return GroupJson(rollouts=list(rollouts) or [rollout(), rollout(reward=0.0)], **filled | fields)


def group(*rollouts: RolloutJson, **fields: Any) -> Group:
    """Build a group as columns, with two default rollouts if none are given."""
    return group_from_json(wire_group(*rollouts, **fields))


def group_of_lengths(lengths: Sequence[int], **fields: Any) -> Group:
    """Build a group with rollouts of these lengths; the prompt is one token."""
    return group(
        *(
            rollout(prompt_ids=[1], completion_ids=[2] * (n - 1), inference_logprobs=[-0.5] * (n - 1), reward=float(k))
            for k, n in enumerate(lengths)
        ),
        **fields,
    )


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
NAMES = st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=8)
TOKENS = st.integers(0, LARGEST_TOKEN)
LOGPROBS = st.floats(-50, 0.0009765625, width=32)
SCORES = st.floats(-1e6, 1e6)
FINISH_REASONS = st.sampled_from([None, "stop", "length", "abort"])
METADATA = st.dictionaries(
    TEXTS,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@st.composite
def version_spans(draw: st.DrawFn, tokens: int, oldest: int) -> list[tuple[int, int, int]]:
    """Draw spans that cover `tokens` completion tokens, with versions ascending from `oldest`."""
    cuts = draw(st.sets(st.integers(1, tokens - 1), max_size=2)) if tokens > 1 else set()
    bounds = [0, *sorted(cuts), tokens]
    return [(oldest + k, bounds[k], bounds[k + 1]) for k in range(len(bounds) - 1)]


DRAWN = ("mask", "ref", "old", "teacher", "advantage", "by_token", "spans", "proof")
"""Optional fields that `wire_groups` draws."""


@st.composite
def trained_prompts(draw: st.DrawFn, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Draw mask and logprobs of prompts: 0 at every first token, and a logprob of 0 wherever the mask is 0."""
    masks = [[0, *(draw(st.integers(0, 1)) for _ in ids[1:])] for ids in prompts]
    if not any(map(any, masks)):
        return [{} for _ in prompts]
    return [
        {"prompt_mask": mask, "prompt_logprobs": [draw(LOGPROBS) if bit else 0.0 for bit in mask]} for mask in masks
    ]


@st.composite
def wire_groups(draw: st.DrawFn, longest: int = 6) -> GroupJson:
    """Draw a JSON group that is valid in a run without limits; each optional field is drawn too."""
    version = draw(st.integers(0, 5))
    size = draw(st.integers(1, 4))
    drawn = {name: draw(st.booleans()) for name in (*DRAWN, "prompt")}
    parts = draw(st.lists(NAMES, max_size=2, unique=True))
    prompts = [draw(st.lists(TOKENS, min_size=1, max_size=longest)) for _ in range(size)]
    trained = draw(trained_prompts(prompts)) if drawn["prompt"] else [{} for _ in prompts]
    rollouts = []
    for prompt_ids, prompt in zip(prompts, trained, strict=True):
        tokens = draw(st.integers(1, longest))

        def per_token(values: st.SearchStrategy[Any], name: str | None = None, n: int = tokens) -> Any:
            return draw(st.lists(values, min_size=n, max_size=n)) if name is None or drawn[name] else None

        rollouts.append(
            RolloutJson(
                prompt_ids=prompt_ids,
                **prompt,
                completion_ids=per_token(TOKENS),
                completion_mask=per_token(st.integers(0, 1), "mask"),
                inference_logprobs=per_token(LOGPROBS),
                ref_logprobs=per_token(LOGPROBS, "ref"),
                old_logprobs=per_token(LOGPROBS, "old"),
                teacher_logprobs=per_token(LOGPROBS, "teacher"),
                token_advantages=per_token(st.floats(-1e6, 1e6, width=32), "by_token"),
                reward=draw(SCORES),
                rewards={name: draw(SCORES) for name in parts},
                advantage=draw(SCORES) if drawn["advantage"] else None,
                version_spans=draw(version_spans(tokens, version)) if drawn["spans"] else None,
                finish_reason=draw(FINISH_REASONS),
                temperature=draw(st.floats(0, 4, width=32)),
                proof=draw(st.binary(max_size=8)) if drawn["proof"] else None,
            )
        )
    return GroupJson(
        group_id=draw(st.none() | NAMES),
        ticket=draw(st.none() | NAMES),
        prompt_index=draw(st.none() | st.integers(0, 2**53 - 1)),
        prompt_id=draw(NAMES),
        adapter=draw(st.just("") | NAMES),
        policy_version=version,
        rollouts=rollouts,
        metadata=draw(METADATA),
    )


def groups(longest: int = 6) -> st.SearchStrategy[Group]:
    """Draw a group as columns."""
    return wire_groups(longest).map(group_from_json)


COLUMNS = (
    "prompt_ids",
    "prompt_lengths",
    "prompt_mask",
    "prompt_logprobs",
    "completion_ids",
    "completion_lengths",
    "completion_mask",
    "inference_logprobs",
    "ref_logprobs",
    "old_logprobs",
    "teacher_logprobs",
    "token_advantages",
    "rewards",
    "advantages",
    "version_spans",
    "temperatures",
    "proofs",
    "proof_lengths",
)
SCALARS = (
    "group_id",
    "prompt_id",
    "policy_version",
    "ticket",
    "prompt_index",
    "adapter",
    "finish_reasons",
    "metadata",
)


def assert_same_group(left: Group, right: Group) -> None:
    """Compare two groups field by field; columns by dtype, shape and value."""
    assert {name: getattr(left, name) for name in SCALARS} == {name: getattr(right, name) for name in SCALARS}
    assert left.reward_parts.keys() == right.reward_parts.keys()
    pairs = [(name, getattr(left, name), getattr(right, name)) for name in COLUMNS]
    pairs += [(f"rewards.{name}", left.reward_parts[name], right.reward_parts[name]) for name in left.reward_parts]
    for name, first, other in pairs:
        assert (first is None) == (other is None), name
        if first is not None:
            assert first.dtype == other.dtype and first.shape == other.shape, name
            np.testing.assert_array_equal(first, other, err_msg=name)


# ---------------------------------------------------------------------- configuration, index, ledger


def run_config(**fields: Any) -> RunConfig:
    """Build a run configuration with the default batch."""
    return RunConfig(**{"batch": BatchSpec()} | fields)


def entry(**values: float) -> npt.NDArray[Any]:
    """Build one index entry, `ENTRY` [1]: a group of 10 tokens in 2 rollouts, sampled by version 0."""
    filled: dict[str, float] = {"prompt_index": NO_PROMPT_INDEX, "tokens": 10, "rollouts": 2, "longest_tokens": 6}
    filled |= values
    made = np.zeros(1, ENTRY)
    for name, value in filled.items():
        made[name] = value
    return made


def entries(*values: Mapping[str, float]) -> npt.NDArray[Any]:
    """Build several index entries."""
    return np.concatenate([entry(**values_of) for values_of in values]) if values else np.zeros(0, ENTRY)


def batch_entry(number: int, *, version: int = 0, staleness: int = 0, times_sampled: int = 1) -> BatchEntry:
    """Build one group of a batch record."""
    return BatchEntry(
        number=number,
        group_id=f"g{number}",
        prompt_id="p",
        prompt_index=None,
        adapter="",
        policy_version=version,
        staleness=staleness,
        times_sampled=times_sampled,
        tokens=10,
        payload_key=f"key{number}",
    )


def batch_record(step: int, groups: Sequence[BatchEntry], *, generation: int = 0, version: int = 0) -> BatchRecord:
    """Build the record of a batch."""
    return BatchRecord(
        step=step,
        generation=generation,
        batch_id=f"{generation}-{step}",
        digest="d",
        version=version,
        strategy="test",
        options={},
        seed=[0, generation, step],
        tokens=10 * len(groups),
        rollouts=2 * len(groups),
        groups=list(groups),
    )


def config_record(max_uses: int | None = 1, **fields: Any) -> ConfigRecord:
    """Build a configuration record; `state` and `reason` go to the record, other fields to the configuration."""
    own = {name: fields.pop(name) for name in ("state", "reason") if name in fields}
    return ConfigRecord(config=msgspec.to_builtins(run_config(**fields)), max_uses=max_uses, **own)


# ---------------------------------------------------------------------- strategies, batches


def live_groups(tokens: Sequence[int], versions: Sequence[int] | None = None, first_row: int = 1) -> Groups:
    """Build the read-only columns that a strategy gets, from lengths and policy versions."""
    n = len(tokens)
    versions = [0] * n if versions is None else versions
    columns: dict[str, npt.NDArray[Any]] = {
        "row": np.arange(first_row, first_row + n, dtype=np.int64),
        "prompt_index": np.arange(n, dtype=np.int64),
        "adapter": np.zeros(n, np.int32),
        "policy_version": np.array(versions, np.int32),
        "policy_version_max": np.array(versions, np.int32),
        "tokens": np.array(tokens, np.int32),
        "rollouts": np.full(n, 2, np.int32),
        "times_sampled": np.zeros(n, np.int32),
        "last_step": np.full(n, -1, np.int32),
        "reward_mean": np.zeros(n, np.float32),
        "reward_std": np.zeros(n, np.float32),
        "advantage_abs_mean": np.zeros(n, np.float32),
        "arrival_s": np.arange(n, dtype=np.float64),
        "priority": np.zeros(n, np.float32),
    }
    for column in columns.values():
        column.flags.writeable = False
    return Groups(**columns)


def buffer_view(**fields: Any) -> BufferView:
    """Build the view of an empty buffer at step 0 with a budget of 100 tokens."""
    filled: dict[str, Any] = {
        "step": 0,
        "version": 0,
        "published_version": 0,
        "steps_per_publish": 1,
        "groups_live": 0,
        "tokens_live": 0,
        "tickets_out": 0,
        "budget": Budget(tokens=100, groups=None, seq_len=64),
    }
    return BufferView(**filled | fields)


def batch_meta(**fields: Any) -> BatchMeta:
    """Build the metadata of a batch body."""
    filled: dict[str, Any] = {
        "run": "r",
        "step": 3,
        "generation": 1,
        "batch_id": "1-3-d",
        "digest": "d",
        "dp_rank": 0,
        "dp_world_size": 1,
        "version": 3,
        "strategy": "on-policy",
        "options": {},
        "micro_batches": 1,
        "adapters": [""],
        "group_ids": ["g"],
        "tokens": 0,
        "padding": 0,
        "loss_tokens": 0,
        "rollouts": 0,
        "batch_tokens": 0,
        "batch_loss_tokens": 0,
        "batch_rollouts": 0,
        "batch_groups": 1,
    }
    return BatchMeta(**filled | fields)


def waiting_answer(reason: str, blocked_on: str = "producers", **fields: Any) -> WaitingAnswer:
    """Build a waiting answer."""
    filled: dict[str, Any] = {"have": Amount(), "need": Amount(groups=1), "retry_after_s": 0.5} | fields
    return WaitingAnswer(reason=reason, blocked_on=blocked_on, **filled)


RUN_STATUS: dict[str, Any] = {
    "run": "r",
    "state": "running",
    "paused_reason": None,
    "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 1}},
    "durability": "strict",
    "epoch": 0,
    "generation": 0,
    "step": 0,
    "published_version": 0,
    "groups": {
        "stored": 0,
        "live": 0,
        "in_batches": 0,
        "retired": 0,
        "evicted": {},
        "dead_lettered": 0,
        "rejected": {},
    },
    "tokens": {"live": 0},
    "bytes": {"live": 0},
    "tickets": {"issued": 0, "out": 0, "expired": 0, "returned": 0, "failed": 0},
    "staleness": {},
    "histograms": {
        "times_sampled": {},
        "age_at_use_s": {"count": 0, "sum": 0, "buckets": []},
        "rollout_tokens": {},
        "longest_rollout_tokens": {},
        "dropped": {},
    },
    "coverage": {"issued": 0, "stored": 0, "trained": 0, "dropped": 0, "failed": 0, "pending": 0, "share": 0.0},
    "waiting": None,
    "adapters": {},
    "checkpoints": [],
    "oldest_step": 0,
    "config": {},
}
"""Answer of `GET /v1/runs/{run}` for a new run."""


def run_status(**fields: Any) -> RunStatus:
    """Build the status of a new run, with `fields` replaced."""
    return msgspec.convert(RUN_STATUS | fields, RunStatus)


async def arriving(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield items as an append reads them."""
    for item in items:
        yield item
