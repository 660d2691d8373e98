"""Groups drawn at random with the lengths of a reasoning run."""

from __future__ import annotations

import numpy as np

from replaybuf.wire.group import Group

PROMPT_TOKENS = 128
VOCABULARY = 150_000


def random_group(
    rng: np.random.Generator, number: int, *, rollouts: int = 8, mean_tokens: int = 1024, longest: int = 8192
) -> Group:
    """Draw a group with lognormal lengths of about `mean_tokens`, prompt and completion together."""
    lengths = np.clip(rng.lognormal(np.log(mean_tokens * 0.85), 0.6, rollouts), PROMPT_TOKENS + 16, longest)
    completion = (lengths - PROMPT_TOKENS).astype(np.int32)
    c = int(completion.sum())
    spans = np.zeros((rollouts, 4), np.int32)
    spans[:, 0], spans[:, 3] = np.arange(rollouts), completion
    return Group(
        group_id=f"g{number}",
        prompt_id=f"p{number}",
        policy_version=0,
        prompt_ids=rng.integers(0, VOCABULARY, PROMPT_TOKENS * rollouts).astype(np.int32),
        prompt_lengths=np.full(rollouts, PROMPT_TOKENS, np.int32),
        completion_ids=rng.integers(0, VOCABULARY, c).astype(np.int32),
        completion_lengths=completion,
        completion_mask=np.ones(c, np.bool_),
        inference_logprobs=-rng.random(c).astype(np.float32),
        rewards=rng.random(rollouts),
        advantages=rng.standard_normal(rollouts),
        version_spans=spans,
        temperatures=np.ones(rollouts, np.float32),
        finish_reasons=("stop",) * rollouts,
    )
