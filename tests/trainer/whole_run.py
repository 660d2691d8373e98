"""Whole runs in which the weights change: `replaybuf serve` and `replaybuf generate` are real, the test is the trainer.

What was stored is held against what transformers computes with the weights as they were saved for each version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from replaybuf.generator.fleet.publication import OnPublish
from replaybuf_trainer.models.loading import load_model, save_model
from replaybuf_trainer.models.tiny import character_tokenizer
from replaybuf_trainer.publishers.engines import Engines
from replaybuf_trainer.publishers.reload import FolderLoader
from tests.conftest import RunClient
from tests.forked import ForkedProcess
from tests.trainer.served import oracle
from tests.waiting import eventually, patience

BOUND = 1e-3
"""In nats. Both sides compute in float32 and differ by rounding, 2e-6; another version differs by nats."""
FAR = 100
"""So many bounds away are the logprobs of a neighbouring version at least."""
DISTINCT_TOKENS = 4
"""A rollout of fewer tokens may come by chance so near to what another version would have given it."""
VOCAB_SIZE = 98
CONTEXT_TOKENS = 256
BLOCK_TOKENS = 32
"""Prompts of more than this many tokens leave KV blocks that the next request of the same prompt takes over."""
STEPS, GROUPS, GROUP_SIZE, MAX_TOKENS = 6, 4, 4, 96
VERSIONS = STEPS + 1
END_TIMEOUT_S = 60.0
METRICS = "generate.jsonl"
WORDS = ("buffer", "replay", "policy", "rollout", "ticket")

Floats = npt.NDArray[np.float64]
Oracle = Callable[[dict[str, Any], int], Floats]
"""The logprobs, float64 [T], that a version gives the completion of a rollout."""


def write_version(folder: Path, version: int) -> Path:
    """Write the model folder of a policy version below `folder`, float32, with weights of its own; return it.

    The output layer is not tied to the embeddings: on the CPU, vLLM 0.31 goes on with the old one after
    `reload_weights` where it is. Weights are five times as large as usual, so that every layer counts in the logprobs.
    """
    tokenizer = folder / "tokenizer"
    if not tokenizer.is_dir():
        character_tokenizer().save_pretrained(tokenizer)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(version)
    made = folder / f"v{version}"
    save_model(Qwen3ForCausalLM(config).float(), tokenizer, made)
    return made


def oracle_of(versions: Sequence[Path]) -> Oracle:
    """Ask transformers, with the weights as they were saved for each version."""
    model = functools.cache(lambda version: load_model(versions[version]))

    def asked(rollout: dict[str, Any], version: int) -> Floats:
        return np.array(oracle(model(version), rollout["prompt_ids"], rollout["completion_ids"]))

    return asked


@contextlib.contextmanager
def generating(
    folder: Path, run: RunClient, engine: str, tokenizer: Path, on_publish: OnPublish, **options: str
) -> Iterator[ForkedProcess]:
    """Run `replaybuf generate` beside the block."""
    prompts = folder / "prompts.jsonl"
    # Longer than a KV block, and few: they come again and again, also after their blocks were made by older weights.
    texts = [" ".join([word] * BLOCK_TOKENS)[: 2 * BLOCK_TOKENS + 5] for word in WORDS]
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": "-"}) + "\n" for text in texts))
    flags = {
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
    } | options
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
    process = ForkedProcess("replaybuf", ["generate", *arguments], os.environ, None)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(END_TIMEOUT_S * patience())


def train(
    run: RunClient,
    engines: Sequence[str],
    versions: Sequence[Path],
    on_publish: OnPublish,
    sampling: Callable[[], object],
) -> None:
    """Take every batch and answer it with new weights: into the engines first, then announced."""
    publisher = Engines(engines, END_TIMEOUT_S, on_publish)
    epoch = run.attach()
    try:
        for step in range(STEPS):
            run.ready_batch(step, epoch)
            assert run.ack(step, epoch).status_code == 200
            eventually(sampling, END_TIMEOUT_S)
            publisher.switch(FolderLoader(versions[step + 1]), step + 1, lambda: None)
            assert run.publish(step + 1, epoch).status_code == 200
        assert run.http.patch(run.path, json={"state": "finished"}).status_code == 200
    finally:
        publisher.close()


def generated(
    folder: Path,
    run: RunClient,
    engine: str,
    versions: Sequence[Path],
    on_publish: OnPublish,
    loaded: Sequence[str] = (),
    sampling: Callable[[], object] = lambda: True,
    **options: str,
) -> list[dict[str, Any]]:
    """Run from version 0 through all steps; return the groups as stored.

    `loaded`: engines that get the weights, in this order; the one that samples by default. `sampling`: whether it
    samples now; weights are loaded when it does. It can at any time: no group gets too stale, and the trainer ends the
    run.
    """
    engines = loaded or (engine,)
    publisher = Engines(engines, END_TIMEOUT_S)
    publisher.switch(FolderLoader(versions[0]), 0, lambda: None)
    publisher.close()
    config = {
        "batch": {"groups_per_batch": GROUPS, "tokens_per_batch": 8192, "seq_len": 256},
        "group_size": GROUP_SIZE,
        "strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 1000}},
    }
    assert run.put(**config).status_code == 201
    with generating(folder, run, engine, versions[0], on_publish, **options) as process:
        train(run, engines, versions, on_publish, sampling)
        _, error = process.communicate(END_TIMEOUT_S * patience())
        assert process.returncode == 0, error
    names = [entry["group_id"] for entry in run.get("groups", limit=500).json()["groups"]]
    assert run.state()["groups"]["stored"] == len(names) >= STEPS * GROUPS
    return [run.get(f"groups/{name}").json() for name in names]


def largest_error(logprobs: Sequence[float], expected: Floats) -> float:
    """Return the largest difference of stored logprobs from these, in nats."""
    return float(np.abs(np.array(logprobs) - expected).max())


def check_old_logprobs(groups: Sequence[dict[str, Any]], logprobs: Oracle) -> None:
    """Hold the old-policy logprobs of every group against the version its metadata name, and against its neighbours."""
    newer = 0
    for group in groups:
        version = group["metadata"]["old_logprobs"]["policy_version"]
        newer += version > group["policy_version"]
        assert version >= group["policy_version"]
        for rollout in group["rollouts"]:
            assert largest_error(rollout["old_logprobs"], logprobs(rollout, version)) < BOUND
            for other in (version - 1, version + 1):
                if 0 <= other < VERSIONS and len(rollout["completion_ids"]) >= DISTINCT_TOKENS:
                    assert largest_error(rollout["old_logprobs"], logprobs(rollout, other)) > FAR * BOUND
    assert newer, "some must have been sampled before the version that computed them"
