"""The cost of a rollout, counted from the weights, is that of the model's shape."""

from __future__ import annotations

import pytest

from replaybuf.client.cost import ModelShape, cost_of
from replaybuf_trainer.models.cost import model_cost
from replaybuf_trainer.models.tiny import new_model
from tests.trainer.models.families import tiny

SHAPE = ModelShape(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=98,
)


def test_the_cost_of_a_token_is_two_operations_per_weight_of_the_matrices() -> None:
    """Embeddings are tied, so the one matrix is that of the logits."""
    model = new_model(0)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert model_cost(model).linear == 2 * weights


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_the_cost_of_a_dense_model_is_that_of_its_shape(family: str) -> None:
    """With embeddings of their own, which cost nothing."""
    assert model_cost(tiny(family, tie_word_embeddings=False)) == cost_of(SHAPE)


def test_learned_positions_cost_nothing() -> None:
    shape = ModelShape(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=128, vocab_size=98, gated=False
    )
    assert model_cost(tiny("gpt2")) == cost_of(shape)


@pytest.mark.parametrize(("family", "size"), [("mixtral", 64), ("qwen3_moe", 16)])
def test_only_the_active_experts_count(family: str, size: int) -> None:
    """Two of four, and the router."""
    router, inactive = 32 * 4, 3 * 32 * (64 - 2 * size)
    expected = cost_of(SHAPE).linear + 2 * 2 * (router - inactive)
    assert model_cost(tiny(family)).linear == expected
