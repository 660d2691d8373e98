"""Proofs by toploc's own library: the plug-in alone, and in a real service."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from replaybuf.admission import Group, Refusal
from replaybuf.testing import AdmissionContract
from replaybuf.wire.group import GroupJson, RolloutJson, group_from_json
from replaybuf_toploc import Toploc, ToplocOptions, build_proof
from replaybuf_toploc.admission import hidden_states, load_model
from tests.conftest import RunClient, ServeProcess
from tests.waiting import eventually

CHUNK_TOKENS, TOPK, TOKENS = 8, 32, 20
SIZES = {"chunk_tokens": CHUNK_TOKENS, "topk": TOPK}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="session")
def models(weights: Path) -> list[Any]:
    """The models of both versions."""
    return [load_model(weights / f"v{version:06d}") for version in (0, 1)]


def completion_of(seed: int) -> list[int]:
    """Draw a completion."""
    made: list[int] = torch.randint(3, 98, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


def proven(model: Any, *, version: int = 0, prompt_id: str = "p", **changes: Any) -> Group:
    """Build a group of two rollouts with the proofs of this model; `changes` of the second rollout."""
    rollouts = [
        RolloutJson(
            prompt_ids=PROMPT,
            completion_ids=(completion := completion_of(seed)),
            inference_logprobs=[-1.0] * TOKENS,
            reward=1.0,
            proof=build_proof(hidden_states(model, PROMPT, completion), CHUNK_TOKENS, TOPK),
        )
        for seed in (1, 2)
    ]
    for name, value in changes.items():
        setattr(rollouts[1], name, value)
    return group_from_json(GroupJson(group_id="g", prompt_id=prompt_id, policy_version=version, rollouts=rollouts))


def plugin(weights: Path, **options: Any) -> Toploc:
    return Toploc(ToplocOptions(model=f"{weights}/v{{version:06d}}", **SIZES | options))


def reason(verdict: Refusal | None) -> str | None:
    return verdict.reason if verdict else None


class TestContract(AdmissionContract):
    """The contract suite."""

    @pytest.fixture(autouse=True)
    def _weights(self, weights: Path) -> None:
        self.weights = weights

    def build(self) -> Toploc:
        return plugin(self.weights)


def test_a_proof_of_the_right_weights_is_admitted_in_one_pass(weights: Path, models: list[Any]) -> None:
    """The producer computed token by token, as an engine does; the plug-in computes all tokens at once."""
    assert plugin(weights).check(proven(models[0])) is None
    assert plugin(weights).check(proven(models[1], version=1)) is None
    hidden, past = [], None
    ids = [PROMPT, *([token] for token in completion_of(2)[:-1])]
    for tokens in ids:
        with torch.inference_mode():
            step = models[0](input_ids=torch.tensor([tokens]), past_key_values=past, use_cache=True)
        hidden.append(step.last_hidden_state[0, -1])
        past = step.past_key_values
    by_token = build_proof(torch.stack(hidden), CHUNK_TOKENS, TOPK)
    assert plugin(weights).check(proven(models[0], proof=by_token)) is None


def test_one_changed_token_is_refused_with_a_chunk_for_each_token(weights: Path, models: list[Any]) -> None:
    completion = completion_of(2)
    first, second = (
        build_proof(hidden_states(models[0], PROMPT, tokens), 1, TOPK) for tokens in (completion_of(1), completion)
    )

    def verdict(tokens: list[int]) -> Refusal | None:
        made = proven(models[0], completion_ids=tokens)
        proofs = {
            "proofs": np.frombuffer(first + second, np.uint8),
            "proof_lengths": np.array([len(first), len(second)], np.int32),
        }
        return plugin(weights, chunk_tokens=1).check(msgspec.structs.replace(made, **proofs))

    assert verdict(completion) is None
    completion[9] = 3 if completion[9] != 3 else 4
    refusal = verdict(completion)
    assert refusal is not None and refusal.reason == "wrong_proof"
    assert "rollouts[1].proof, from token 10 on" in refusal.detail


def test_proofs_of_other_weights_prompts_and_noise_are_refused(weights: Path, models: list[Any]) -> None:
    assert reason(plugin(weights).check(proven(models[1]))) == "wrong_proof"
    assert reason(plugin(weights).check(proven(models[0], completion_ids=completion_of(3)))) == "wrong_proof"
    assert reason(plugin(weights).check(proven(models[0], version=1))) == "wrong_proof"
    assert reason(plugin(weights).check(proven(models[0], prompt_ids=[9, 9, 9, 9]))) == "wrong_proof"
    noise = build_proof(torch.randn(TOKENS, 128), CHUNK_TOKENS, TOPK)
    assert reason(plugin(weights).check(proven(models[0], proof=noise))) == "wrong_proof"


@pytest.mark.parametrize("wrong", ["empty", "short", "few", "many", "zero"])
def test_bytes_that_would_end_the_process_of_toploc_are_refused(weights: Path, models: list[Any], wrong: str) -> None:
    """Wrong lengths and a modulus of 0 end a process in toploc 0.1.6; too few chunks would pass."""
    right = build_proof(hidden_states(models[0], PROMPT, completion_of(2)), CHUNK_TOKENS, TOPK)
    size = len(right) // 3
    proof = {
        "empty": b"",
        "short": right[:-1],
        "few": right[:size],
        "many": right + right,
        "zero": bytes(len(right)),
    }[wrong]
    assert reason(plugin(weights).check(proven(models[0], proof=proof))) == "malformed_proof"


def test_versions_that_cannot_be_verified_are_refused(weights: Path, models: list[Any]) -> None:
    """A producer could claim them else."""
    mixed = proven(models[0], version_spans=[(0, 0, 5), (1, 5, TOKENS)])
    assert reason(plugin(weights).check(mixed)) == "several_versions"
    assert reason(plugin(weights).check(proven(models[0], version=7))) == "unknown_version"


def test_the_secret_chooses_the_share_that_is_verified(weights: Path, models: list[Any], tmp_path: Path) -> None:
    """The same prompt is chosen again whatever its tokens are; another secret chooses other prompts."""
    chosen = []
    for secret in ("one", "other"):
        (tmp_path / secret).write_text(secret)
        checks = plugin(weights, check_share=0.25, seed_file=str(tmp_path / secret))
        groups = {name: proven(models[0], prompt_id=name) for name in map(str, range(200))}
        chosen.append({name for name, group in groups.items() if checks.chooses(group)})
        assert 20 < len(chosen[-1]) < 90
        name = next(iter(chosen[-1]))
        wrong = proven(models[1], prompt_id=name)
        assert reason(checks.check(wrong)) == "wrong_proof" == reason(checks.check(wrong))
        other = next(iter(groups.keys() - chosen[-1]))
        assert checks.check(proven(models[1], prompt_id=other)) is None
    assert chosen[0] != chosen[1]
    with pytest.raises(ValueError, match="needs seed_file"):
        plugin(weights, check_share=0.5)


def test_a_service_stores_proven_groups_and_no_others(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient], weights: Path, models: list[Any]
) -> None:
    """Over HTTP, with the plug-in by its entry point, its model in the process beside the service."""
    run = connect(own_service.url, "proven")
    options = {"model": f"{weights}/v{{version:06d}}", **SIZES}
    created = run.put(
        batch={"groups_per_batch": 1}, admissions=[{"name": "toploc", "options": options, "timeout_s": 300}]
    )
    assert created.status_code == 201, created.text

    def wire(group_id: str, model: Any) -> dict[str, Any]:
        rollouts = []
        for seed in (1, 2):
            hidden = hidden_states(model, PROMPT, completion_of(seed))
            proof = base64.b64encode(build_proof(hidden, CHUNK_TOKENS, TOPK)).decode()
            rollouts.append(
                {
                    "prompt_ids": PROMPT,
                    "completion_ids": completion_of(seed),
                    "inference_logprobs": [-1.0] * TOKENS,
                    "reward": 1.0,
                    "proof": proof,
                }
            )
        return {"group_id": group_id, "prompt_id": group_id, "policy_version": 0, "rollouts": rollouts}

    answer = eventually(
        lambda: run.post("groups", groups=[wire("honest", models[0]), wire("other", models[1])]),
        within_s=120.0,
        wanted=lambda answer: answer.status_code != 429,
    )
    assert answer.status_code == 200, answer.text
    honest, other = answer.json()["results"]
    assert honest["status"] in ("stored", "duplicate") and other["reason"] == "wrong_proof"
    assert run.batch(0, run.attach()).status_code == 200
