"""The start-up test accepts models that compute packed rows right, and rejects all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replaybuf.errors import Invalid
from replaybuf_trainer.models import isolation, output_head
from replaybuf_trainer.models import packed_forward as packed_forward_module
from replaybuf_trainer.models.isolation import check_isolation
from replaybuf_trainer.models.logprobs import PackedLogprobs
from replaybuf_trainer.models.packed_forward import packed_forward
from tests.trainer.batches import logprobs_alone, packed, rollouts, trained_rows
from tests.trainer.models import varlen
from tests.trainer.models.families import ACCEPTED, MIXING, tiny, write_tiny

ROWS = [[2, 0], [1]]


@pytest.mark.parametrize("family", sorted(ACCEPTED))
def test_an_accepted_model_has_the_logprobs_of_single_rollouts(family: str) -> None:
    """With logits as large as those of trained models, where a wrong cap or scale would show."""
    model = tiny(family)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)
    check_isolation(model, family, "")
    members = rollouts(3, seed=0)
    with torch.no_grad():
        logprobs = packed_forward(model, trained_rows(packed(members, ROWS, pad_to_multiple_of=8))).logprobs
        expected = [
            logprobs_alone(model, members[number])[t, token]
            for row in ROWS
            for number in row
            for t, token in enumerate(members[number].completion_ids)
            if members[number].completion_mask[t]
        ]
    torch.testing.assert_close(logprobs, torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(MIXING))
def test_a_model_that_mixes_rollouts_is_rejected(family: str) -> None:
    with pytest.raises(Invalid, match=f"^{family} mixes the rollouts of packed rows.*Use another"):
        check_isolation(tiny(family), family, "Use another")


@pytest.mark.parametrize("family", ["cohere", "gemma2", "granite", "nanochat"])
def test_an_unknown_change_of_the_logits_is_rejected(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a cap far above the small logits of random weights, which changes them by 1e-5 only."""
    monkeypatch.setattr(
        isolation, "output_head", lambda model: output_head.OutputHead(model.get_output_embeddings().weight)
    )
    with pytest.raises(Invalid, match=f"{family} computes other logits"):
        check_isolation(tiny(family), family, "")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_of_ones_is_noticed(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tokenizers give it; it makes one long rollout of a row."""
    model = tiny("qwen3", attention)
    forward = model.model.forward

    def mixed(**keywords: Any) -> Any:
        return forward(**keywords | {"attention_mask": torch.ones_like(keywords["input_ids"])})

    monkeypatch.setattr(model.model, "forward", mixed)
    with pytest.raises(Invalid, match="mixes the rollouts"):
        check_isolation(model, "it", "")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "mistral", "qwen3_moe"])
def test_attention_of_variable_length_needs_the_bounds_of_the_rollouts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family, varlen.NAME)
    check_isolation(model, "it", "")
    monkeypatch.setattr(packed_forward_module, "segment_bounds", lambda _: {})
    with pytest.raises(Invalid, match="mixes the rollouts"):
        check_isolation(model, "it", "")


def test_a_reference_model_that_mixes_rollouts_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"OPTForCausalLM\) mixes .*Serve it by vLLM") as raised:
        PackedLogprobs(write_tiny(tmp_path, "opt"))
    assert raised.value.name == "ref_model"
