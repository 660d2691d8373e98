"""Cost of a rollout from the shape of the model."""

from __future__ import annotations

import msgspec
import pytest

from replaybuf.client.cost import ModelShape, cost_of
from replaybuf.wire.config import Cost


def test_the_cost_of_gpt_3_matches_its_paper() -> None:
    """Brown et al. 2020, table D.1: 175B parameters, 3.14e23 operations for 300B tokens, attention left out."""
    shape = ModelShape(
        num_hidden_layers=96, hidden_size=12288, num_attention_heads=96, intermediate_size=4 * 12288, vocab_size=50257,
        gated=False,
    )  # fmt: skip
    assert 3 * cost_of(shape).linear * 300e9 == pytest.approx(3.14e23, rel=0.01)


def test_the_cost_of_grouped_query_attention_and_a_custom_head_size() -> None:
    """Qwen3-0.6B, counted by hand."""
    shape = ModelShape(
        num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151936,
    )  # fmt: skip
    layer = 2 * 1024 * 16 * 128 + 2 * 1024 * 8 * 128 + 3 * 1024 * 3072
    assert cost_of(shape) == Cost(2.0 * (28 * layer + 1024 * 151936), 2.0 * 28 * 16 * 128)


def test_the_causal_mask_halves_the_cost_of_attention() -> None:
    """Without a mask a layer costs 2·2·L²·d·H operations."""
    shape = ModelShape(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=1, vocab_size=1)
    assert cost_of(shape).quadratic == 2 * 2 * 64 / 2


def test_a_shape_without_layers_is_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="num_hidden_layers"):
        msgspec.convert(
            {"num_hidden_layers": 0, "hidden_size": 1, "num_attention_heads": 1, "intermediate_size": 1,
             "vocab_size": 1},
            ModelShape,
        )  # fmt: skip
