"""Runs on vLLM whose weights change in the middle: what the buffer stored is what the stamped version sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from replaybuf.generator.fleet.publication import OnPublish
from tests.conftest import RunClient
from tests.trainer.whole_run import (
    BOUND,
    DISTINCT_TOKENS,
    END_TIMEOUT_S,
    FAR,
    METRICS,
    Floats,
    Oracle,
    check_old_logprobs,
    generated,
    largest_error,
    oracle_of,
)


@pytest.fixture
def logprobs(versions: list[Path]) -> Oracle:
    """Transformers, with the weights as they were saved for each version."""
    return oracle_of(versions)


def outcomes(folder: Path) -> dict[str, int]:
    """Return how the generator's requests to vLLM ended, by its last report."""
    (engine,) = json.loads((folder / METRICS).read_text().splitlines()[-1])["engines"]
    ended: dict[str, int] = engine["outcomes"]
    return ended


def frozen_in_sampling(engine: str) -> bool:
    """Freeze the completions that run now, until the next load; return whether there are any, else resume.

    So the load meets rollouts in the middle on any machine. A look alone comes too late when they are short.
    """
    httpx.post(f"{engine}/pause?mode=keep&clear_cache=false", timeout=END_TIMEOUT_S).raise_for_status()
    metrics = httpx.get(f"{engine}/metrics", timeout=END_TIMEOUT_S).text
    (running,) = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", metrics, re.MULTILINE)
    if float(running):
        return True
    httpx.post(f"{engine}/resume", timeout=END_TIMEOUT_S).raise_for_status()
    return False


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


@pytest.mark.parametrize("on_publish", ["drain", "abort-and-resume", "abort"])
def test_stored_logprobs_are_those_of_the_versions_stamped_and_of_no_neighbour(
    on_publish: OnPublish, vllm: str, versions: list[Path], logprobs: Oracle, run: RunClient, tmp_path: Path
) -> None:
    """And where rollouts mix versions, their old-policy logprobs those of the one version recorded.

    The server that samples computes them too, and cuts off requests for them to load weights.
    """
    micro_batch = '{"old": {"micro_batch": 3}}'
    old = {"old-engine": vllm, "logprob-options": micro_batch} if on_publish == "abort-and-resume" else {}
    # Drained, completions end before the load, so none may be frozen.
    sampling = (lambda: True) if on_publish == "drain" else (lambda: frozen_in_sampling(vllm))
    groups = generated(tmp_path, run, vllm, versions, on_publish, (), sampling, **old)
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
        assert largest_error(rollout["inference_logprobs"], stamped(rollout, logprobs)) < BOUND
        for shift in neighbours(rollout, len(versions)):
            assert largest_error(rollout["inference_logprobs"], stamped(rollout, logprobs, shift)) > FAR * BOUND
            checked += 1
    assert checked > len(rollouts), "most have two neighbours"
    if old:
        check_old_logprobs(groups, logprobs)


def test_frozen_in_flight_without_spans_the_metadata_names_both_versions_and_the_older_is_stamped(
    vllm: str, versions: list[Path], logprobs: Oracle, run: RunClient, tmp_path: Path
) -> None:
    groups = generated(tmp_path, run, vllm, versions, "in-flight", (), lambda: frozen_in_sampling(vllm))
    changed = [group for group in groups if "weight_versions" in group["metadata"]]
    assert changed, "some must have been in flight"
    for group in groups:
        for rollout in group["rollouts"]:
            if group not in changed:
                assert largest_error(rollout["inference_logprobs"], stamped(rollout, logprobs)) < BOUND
                continue
            between = group["metadata"]["weight_versions"]
            assert rollout["version_spans"] == [[between["before"], 0, len(rollout["completion_ids"])]]
            assert sampled_in_turn(rollout, logprobs, range(between["before"], between["after"] + 1))
