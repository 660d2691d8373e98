"""Content of groups, derived from their names alone: the checker can verify the tokens of any batch.

Groups of the chaos producers derive from `group_id`; those of `replaybuf generate` spell their prompt backwards, as the
engine double does, and have a `prompt_id` that starts with `spell/`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import numpy as np

from replaybuf.wire.answer.browse import StoredGroup
from replaybuf.wire.group import Group
from tests.generator.doubles import LETTERS

GROUP_SIZE = 2
VOCAB_SIZE = 1000
SPELLED = "spell/"
COLUMN = "ref_logprobs"
"""What a stage adds, by `references`."""
GENERATED = "exact-match"
"""Source of the groups of `replaybuf generate`: its environment."""
_SOURCES = ("a", "a", "a", "a", "b", "b", "b", "c")


def rollout_of(group_id: str, rollout: int) -> tuple[list[int], list[int]]:
    """Derive prompt and completion of one rollout: 2 to 5 and 3 to 10 tokens."""
    seed = hashlib.sha256(f"{group_id}/prompt".encode()).digest()
    own = hashlib.sha256(f"{group_id}/{rollout}".encode()).digest()
    prompt = list(seed[: 2 + seed[-1] % 4])
    completion = [byte + 256 * (byte % 3) for byte in own[: 3 + own[-1] % 8]]
    return prompt, completion


def make_group(
    group_id: str, policy_version: int, *, named: bool, ticket: str | None = None, adapter: str = ""
) -> Group:
    """Build the group called `group_id`; without `named` the service names it by its ticket."""
    rollouts = [rollout_of(group_id, number) for number in range(GROUP_SIZE)]
    prompts, completions = zip(*rollouts, strict=True)
    lengths = np.array([len(ids) for ids in completions], np.int32)
    tokens = int(lengths.sum())
    return Group(
        group_id=group_id if named else None,
        ticket=ticket,
        prompt_id=f"chaos/{group_id}",
        adapter=adapter,
        policy_version=policy_version,
        prompt_ids=np.concatenate([np.array(ids, np.int32) for ids in prompts]),
        prompt_lengths=np.array([len(ids) for ids in prompts], np.int32),
        completion_ids=np.concatenate([np.array(ids, np.int32) for ids in completions]),
        completion_lengths=lengths,
        completion_mask=np.ones(tokens, np.bool_),
        inference_logprobs=np.full(tokens, -0.5, np.float32),
        rewards=np.arange(GROUP_SIZE, dtype=np.float64),
        version_spans=np.array(
            [[number, policy_version, 0, length] for number, length in enumerate(lengths.tolist())], np.int32
        ),
        temperatures=np.ones(GROUP_SIZE, np.float32),
        finish_reasons=("stop",) * GROUP_SIZE,
        metadata={"source": source_of(group_id, "")},
    )


def references(group: StoredGroup) -> list[list[float]]:
    """Compute the late column of a group for `replaybuf stage`."""
    return [[reference_of(token) for token in rollout.completion_ids] for rollout in group.rollouts or []]


def reference_of(token: int) -> float:
    """Derive the value of a token in the late column."""
    return -(token % 16) / 16


def source_of(group_id: str, prompt_id: str) -> str:
    """Return the source of a group in a mix."""
    if prompt_id.startswith(SPELLED):
        return GENERATED
    return _SOURCES[zlib.crc32(group_id.encode()) % len(_SOURCES)]


def priority_of(group_id: str, step: int) -> float:
    """Return the priority of a group that the trainer sends after `step`: 0 to 9."""
    return float(zlib.crc32(f"{group_id}/{step}".encode()) % 10)


def tokens_of(group_id: str, prompt_id: str, rollout: int) -> list[int]:
    """Return the tokens of a rollout that a batch must hold: prompt and completion."""
    if prompt_id.startswith(SPELLED):
        prompt = [LETTERS.index(letter) for letter in prompt_id.removeprefix(SPELLED)]
        return prompt + prompt[::-1]
    prompt, completion = rollout_of(group_id, rollout)
    return prompt + completion


def checksum(tokens: Iterable[int]) -> int:
    """Sum up token ids."""
    return zlib.crc32(np.fromiter(tokens, np.int32).tobytes())
