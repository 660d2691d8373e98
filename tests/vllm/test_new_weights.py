"""A run on vLLM whose weights change in the middle: what the buffer stored is what the stamped version sampled.

`replaybuf serve` and `replaybuf generate` are real; the test is the trainer, and loads weights as
the trainer does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from replaybuf.generator.publication import OnPublish
from replaybuf_trainer.model import load_model
from replaybuf_trainer.publisher import EnginePublisher
from tests.conftest import RunClient
from tests.trainer.served import oracle
from tests.vllm.served import BLOCK_TOKENS

BOUND = 1e-3
"""In nats. Both sides compute in float32 and differ by rounding, 2e-6; another version differs by nats."""
FAR = 100
"""So many bounds away are the logprobs of a neighbouring version at least."""
DISTINCT_TOKENS = 4
"""A rollout of fewer tokens may come by chance so near to what another version would have given it."""
STEPS, GROUPS, GROUP_SIZE, MAX_TOKENS = 6, 4, 4, 96
END_TIMEOUT_S = 60.0
METRICS = "generate.jsonl"
WORDS = ("buffer", "replay", "policy", "rollout", "ticket")

Floats = npt.NDArray[np.float64]
Oracle = Callable[[dict[str, Any], int], Floats]
"""The logprobs, float64 [T], that a version gives the completion of a rollout."""


@pytest.fixture
def logprobs(versions: list[Path]) -> Oracle:
    """Transformers, with the weights as they were saved for each version."""
    model = functools.cache(lambda version: load_model(versions[version]))

    def asked(rollout: dict[str, Any], version: int) -> Floats:
        return np.array(oracle(model(version), rollout["prompt_ids"], rollout["completion_ids"]))

    return asked


@contextlib.contextmanager
def generating(
    folder: Path, run: RunClient, engine: str, tokenizer: Path, on_publish: OnPublish
) -> Iterator[subprocess.Popen[str]]:
    """Run `replaybuf generate` beside the block."""
    prompts = folder / "prompts.jsonl"
    # Longer than a KV block, and few: they come again and again, also after their blocks were made by older weights.
    texts = [" ".join([word] * BLOCK_TOKENS)[: 2 * BLOCK_TOKENS + 5] for word in WORDS]
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": "-"}) + "\n" for text in texts))
    options = {
        "url": str(run.http.base_url),
        "run": run.run,
        "engine": engine,
        "environment": "exact-match",
        "prompts": str(prompts),
        "tokenizer": str(tokenizer),
        "max-tokens": str(MAX_TOKENS),
        "on-publish": on_publish,
        "metrics-file": str(folder / METRICS),
        # Few, and room for more: when four groups are ready and weights are loaded, the next ones are in flight.
        "max-inflight-groups": "3",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "replaybuf.cli", "generate", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def train(run: RunClient, engine: str, versions: Sequence[Path], on_publish: OnPublish) -> None:
    """Take every batch and answer it with new weights: into vLLM first, then announced."""
    publisher = EnginePublisher([engine], END_TIMEOUT_S, on_publish)
    epoch = run.attach()
    try:
        for step in range(STEPS):
            response = run.batch(step, epoch, wait_ms=25000)
            assert response.status_code == 200, response.text
            assert run.ack(step, epoch).status_code == 200
            publisher.publish(versions[step + 1], step + 1)
            assert run.publish(step + 1, epoch).status_code == 200
    finally:
        publisher.close()


def generated(
    folder: Path, run: RunClient, engine: str, versions: Sequence[Path], on_publish: OnPublish
) -> list[dict[str, Any]]:
    """Run from version 0 through all steps; return the groups as stored."""
    publisher = EnginePublisher([engine], END_TIMEOUT_S)
    publisher.publish(versions[0], 0)
    publisher.close()
    config = {
        "batch": {"groups_per_batch": GROUPS, "tokens_per_batch": 8192, "seq_len": 256},
        "group_size": GROUP_SIZE,
        "max_steps": STEPS,
        "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 2}},
    }
    assert run.put(**config).status_code == 201
    with generating(folder, run, engine, versions[0], on_publish) as process:
        train(run, engine, versions, on_publish)
        _, error = process.communicate(timeout=END_TIMEOUT_S)
        assert process.returncode == 0, error
    names = [entry["group_id"] for entry in run.get("groups", limit=500).json()["groups"]]
    assert run.state()["groups"]["stored"] == len(names) >= STEPS * GROUPS
    return [run.get(f"groups/{name}").json() for name in names]


def outcomes(folder: Path) -> dict[str, int]:
    """Return how the generator's requests to vLLM ended, by its last report."""
    (engine,) = json.loads((folder / METRICS).read_text().splitlines()[-1])["engines"]
    ended: dict[str, int] = engine["outcomes"]
    return ended


def stamped(rollout: dict[str, Any], logprobs: Oracle, shift: int = 0) -> Floats:
    """Return what the stamped versions, each `shift` later, give the tokens they are stamped on."""
    parts = [logprobs(rollout, version + shift)[start:end] for version, start, end in rollout["version_spans"]]
    return np.concatenate(parts)


def neighbours(rollout: dict[str, Any], versions: int) -> list[int]:
    """List the shifts to versions that there are, for rollouts long enough that only one version can have made them."""
    if len(rollout["completion_ids"]) < DISTINCT_TOKENS:
        return []
    stamps = [version for version, _, _ in rollout["version_spans"]]
    return [shift for shift in (-1, 1) if all(0 <= version + shift < versions for version in stamps)]


def sampled_in_turn(rollout: dict[str, Any], logprobs: Oracle, versions: Sequence[int]) -> bool:
    """Say whether the tokens were sampled by these versions, one after the other."""
    stored = np.array(rollout["inference_logprobs"])
    fits = [np.abs(stored - logprobs(rollout, version)) < BOUND for version in versions]
    now = 0
    for token in range(len(stored)):
        while now < len(versions) and not fits[now][token]:
            now += 1
    return now < len(versions)


def error_of(rollout: dict[str, Any], expected: Floats) -> float:
    """Return the largest difference of the stored logprobs from these, in nats."""
    return float(np.abs(np.array(rollout["inference_logprobs"]) - expected).max())


@pytest.mark.parametrize("on_publish", ["drain", "abort-and-resume", "abort"])
def test_stored_logprobs_are_those_of_the_versions_stamped_and_of_no_neighbour(
    on_publish: OnPublish, vllm: str, versions: list[Path], logprobs: Oracle, run: RunClient, tmp_path: Path
) -> None:
    groups = generated(tmp_path, run, vllm, versions, on_publish)
    rollouts = [rollout for group in groups for rollout in group["rollouts"]]
    served = {span[0] for rollout in rollouts for span in rollout["version_spans"]}
    assert len(served) >= 3, "weights must have changed under the run"
    if on_publish == "abort-and-resume":
        assert any(len(rollout["version_spans"]) > 1 for rollout in rollouts), "some must have been cut off"
    else:
        assert all(len(rollout["version_spans"]) == 1 for rollout in rollouts)
    if on_publish == "abort":
        assert outcomes(tmp_path)["engine_aborted"] > 0, "some must have been cut off"
    checked = 0
    for rollout in rollouts:
        assert error_of(rollout, stamped(rollout, logprobs)) < BOUND
        for shift in neighbours(rollout, len(versions)):
            assert error_of(rollout, stamped(rollout, logprobs, shift)) > FAR * BOUND
            checked += 1
    assert checked > len(rollouts), "most have two neighbours"


def test_frozen_in_flight_without_spans_the_metadata_names_both_versions_and_the_older_is_stamped(
    vllm: str, versions: list[Path], logprobs: Oracle, run: RunClient, tmp_path: Path
) -> None:
    groups = generated(tmp_path, run, vllm, versions, "in-flight")
    changed = [group for group in groups if "weight_versions" in group["metadata"]]
    assert changed, "some must have been in flight"
    for group in groups:
        for rollout in group["rollouts"]:
            if group not in changed:
                assert error_of(rollout, stamped(rollout, logprobs)) < BOUND
                continue
            between = group["metadata"]["weight_versions"]
            assert rollout["version_spans"] == [[between["before"], 0, len(rollout["completion_ids"])]]
            assert sampled_in_turn(rollout, logprobs, range(between["before"], between["after"] + 1))
