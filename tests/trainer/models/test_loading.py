"""Cost of the reference trainer's model."""

from __future__ import annotations

from replaybuf.client.cost import cost_of
from replaybuf_trainer.models.loading import shape_of
from replaybuf_trainer.models.tiny import new_model


def test_the_cost_of_a_token_is_two_operations_per_weight_of_the_matrices() -> None:
    """Embeddings are tied, so the one matrix is that of the logits."""
    model = new_model(0)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert cost_of(shape_of(model)).linear == 2 * weights
