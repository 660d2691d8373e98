"""verl's trainer trains from a run: what arrives, what is used again, and what a kill -9 in every phase changes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import transfer_queue
from omegaconf import OmegaConf
from verl_training import PHASES, PROMPTS, SAMPLES, is_failing, tokens_of, train

from replaybuf.client import Client
from tests.conftest import RunClient, connect, own_service, run, service, shared_service
from tests.waiting import patience

__all__ = ["connect", "own_service", "run", "service", "shared_service"]

# The process that trainings are forked from imports verl once; it knows its own modules only.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["verl_training"])
TIMEOUT_S = 120.0
AHEAD = 3 * PROMPTS


def config_of(groups_per_batch: int = PROMPTS, **changes: Any) -> dict[str, Any]:
    batch = {"groups_per_batch": groups_per_batch, "tokens_per_batch": None, "seq_len": 64}
    strategy = {"name": "one-step-off-policy", "options": {"max_staleness": 2}}
    return {"batch": batch, "group_size": SAMPLES, "strategy": strategy} | changes


@pytest.fixture(scope="session")
def queue(ray_cluster: None) -> Iterator[str]:
    """Start the queue of verl in memory; return the address of its Ray."""
    transfer_queue.close()
    config = {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
    transfer_queue.init(OmegaConf.create(config))
    yield ray.get_runtime_context().gcs_address
    transfer_queue.close()


def arguments(run: RunClient, address: str, folder: Path, **changes: Any) -> dict[str, Any]:
    sampler = {"url": str(run.http.base_url), "run": run.run, "keep_checkpoints": 100, "poll_s": 0.1}
    return {
        "folder": str(folder),
        "ray": address,
        "steps": 4,
        "sampler": sampler,
        "timeout_s": TIMEOUT_S * patience(),
    } | changes


def start(settings: dict[str, Any]) -> int | None:
    """Run a training in a process of its own; return its exit code."""
    process = FORKS.Process(target=train, args=(settings,))
    process.start()
    process.join()
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def run_to_the_end(settings: dict[str, Any]) -> None:
    assert start(settings) == 0, Path(settings["folder"], "log").read_text()[-6000:]


def check(run: RunClient, folder: Path, steps: int, *, max_staleness: int, max_uses: int = 1) -> list[int]:
    """Compare what was trained with the ledger, and the ledger with its bounds; return all uses in order."""
    trained = json.loads((folder / "trained.json").read_text())
    with Client(str(run.http.base_url), run.run) as client:
        records = [client.get_record(step) for step in range(steps)]
        status = client.get_run()
        stored = {group.prompt_id for group in client.list_groups(limit=1000).groups}
    used = [[int(group.prompt_id.removeprefix("numbers/")) for group in record.groups] for record in records]
    assert trained == [sorted(tokens for index in step for tokens in tokens_of(index)) for step in used]
    assert max(group.staleness for record in records for group in record.groups) <= max_staleness
    assert max(group.times_sampled for record in records for group in record.groups) <= max_uses
    assert all(record.state == "acked" for record in records)  # the checkpoint of the last step acks it
    counts = status.groups
    ended = counts.in_batches + counts.retired + sum(counts.evicted.values()) + counts.dead_lettered
    assert counts.stored == counts.live + ended
    assert not counts.rejected
    flat = [index for step in used for index in step]
    known = set(flat) | {int(name.removeprefix("numbers/")) for name in stored}
    assert {index for index in range(max(flat) - AHEAD) if not is_failing(index)} <= known, "a prompt is lost"
    return flat


def test_a_training_is_what_the_ledger_says(run: RunClient, queue: str, tmp_path: Path) -> None:
    assert run.put(**config_of()).status_code == 201
    run_to_the_end(arguments(run, queue, tmp_path, steps=6))
    flat = check(run, tmp_path, 6, max_staleness=2)
    assert len(flat) == len(set(flat)) == 6 * PROMPTS
    assert not any(map(is_failing, flat))


def test_groups_are_used_again_by_priority(run: RunClient, queue: str, tmp_path: Path) -> None:
    options = {
        "max_uses": 2,
        "max_staleness": 4,
        "order": "prioritized",
        "priority": "reward_std",
        "look_ahead": 1,
    }
    config = config_of(2 * PROMPTS, strategy={"name": "replay", "options": options})
    assert run.put(**config).status_code == 201
    run_to_the_end(arguments(run, queue, tmp_path))
    flat = check(run, tmp_path, 4, max_staleness=4, max_uses=2)
    assert len(flat) == 4 * 2 * PROMPTS > len(set(flat))


def test_a_global_step_of_several_batches_is_several_steps(run: RunClient, queue: str, tmp_path: Path) -> None:
    assert run.put(**config_of(PROMPTS // 2, steps_per_publish=2)).status_code == 201
    run_to_the_end(arguments(run, queue, tmp_path, mode="separate_async", parameter_sync_step=2))
    assert len(check(run, tmp_path, 8, max_staleness=2)) == 4 * PROMPTS


@pytest.mark.timeout(7200)
def test_a_killed_training_repeats_what_its_checkpoint_lacks(
    run: RunClient, queue: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    assert run.put(**config_of()).status_code == 201
    kills, rng, died = max(3, int(pytestconfig.getoption("--kills"))), random.Random(5), 0
    phases = rng.sample(PHASES, len(PHASES))
    steps = 2 * kills + 2
    for number in range(kills):
        phase = (
            f"{phases[number % len(phases)]}:{rng.randint(1, 1 if phases[number % len(phases)] == 'attached' else 4)}"
        )
        code = start(arguments(run, queue, tmp_path, steps=steps, die_at=phase))
        print(f"kill {number} at {phase}: exit code {code}", flush=True)
        assert code in (-9, 0), (tmp_path / "log").read_text()[-6000:]
        died += code == -9
    run_to_the_end(arguments(run, queue, tmp_path, steps=steps))
    check(run, tmp_path, steps, max_staleness=2)
    print(f"\n{died} kills, {steps} steps: each as the ledger says")
    assert died >= kills // 2


def test_a_training_runs_on_the_durable_queue(run: RunClient, start_queue: Callable[..., Any], tmp_path: Path) -> None:
    start_queue()
    assert run.put(**config_of()).status_code == 201
    settings = arguments(run, ray.get_runtime_context().gcs_address, tmp_path)
    assert start(settings | {"die_at": "trained:3"}) == -9
    run_to_the_end(settings)
    check(run, tmp_path, 4, max_staleness=2)
