"""LoRA by TRL's `peft_config`: engines get merged weights, and a checkpoint resumes the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from training import STEPS, fill, make_trainer, of_ledger
from transformers import AutoModelForCausalLM

from replaybuf_trl import ReplaybufRolloutWorker, ReplaybufWeightTransfer
from tests.conftest import RunClient
from tests.trainer.engine_process import engine_process
from tests.trainer.served import oracle

WORD = [3, 4, 5]
LEARNING_RATE = 1e-2
"""The adapter changes logprobs by far more than rounding does."""


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def merged(model: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).merge_and_unload()


def test_engines_get_the_merged_weights_of_an_adapter(run: RunClient, model: Path, tmp_path: Path) -> None:
    groups = fill(run)
    with engine_process(model) as engine:
        worker = ReplaybufRolloutWorker(str(run.http.base_url), run.run)
        transfer = ReplaybufWeightTransfer(worker, str(model), [engine.url], weights_dir=tmp_path / "weights")
        trainer = make_trainer(
            run,
            model,
            tmp_path,
            worker=worker,
            weight_transfer=transfer,
            peft_config=lora(),
            learning_rate=LEARNING_RATE,
        )
        trainer.train()
        (choice,) = engine.post("/v1/completions", prompt=WORD, max_tokens=8, logprobs=0, return_token_ids=True).json()[
            "choices"
        ]
    assert all(trainer.trained[step] == of_ledger(run, step, groups) for step in range(STEPS))

    published = load_file(max((tmp_path / "weights").iterdir(), key=lambda folder: folder.name) / "model.safetensors")
    start, policy = load_file(model / "model.safetensors"), merged(model, tmp_path / f"checkpoint-{STEPS}")
    assert published.keys() == start.keys()
    for name, tensor in published.items():
        torch.testing.assert_close(tensor, policy.state_dict()[name], rtol=0, atol=1e-5)
    sampled = choice["logprobs"]["token_logprobs"]
    assert sampled == pytest.approx(oracle(policy, WORD, choice["token_ids"]), abs=1e-3)
    base = AutoModelForCausalLM.from_pretrained(model)
    assert sampled != pytest.approx(oracle(base, WORD, choice["token_ids"]), abs=0.1)


def test_an_adapter_resumes_from_its_checkpoint(run: RunClient, model: Path, tmp_path: Path) -> None:
    groups = fill(run)
    make_trainer(run, model, tmp_path, peft_config=lora(), learning_rate=LEARNING_RATE).train()
    whole = load_file(tmp_path / f"checkpoint-{STEPS}" / "adapter_model.safetensors")

    second = make_trainer(run, model, tmp_path, peft_config=lora(), learning_rate=LEARNING_RATE)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(second.trained) == [2, 3, 4, 5]
    assert all(second.trained[step] == of_ledger(run, step, groups) for step in second.trained)
    resumed = load_file(tmp_path / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    for name, tensor in resumed.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-3)
