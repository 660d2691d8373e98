"""Two LoRA tenants on real processes: the service, one small engine, `replaybuf train`, a generator per tenant.

A third tenant is added and one is removed while they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaybuf_trainer.folders import numbered_folders
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.tiny import character_tokenizer
from tests.cli.test_generate import generator
from tests.conftest import RunClient
from tests.forked import AwaitedProcess, fork_program
from tests.trainer import generated_words
from tests.trainer.adapter_folders import merged
from tests.trainer.engine_process import TIMEOUT_S, EngineProcess, bounded, engine_process
from tests.trainer.generated_words import ADDED, WANTED
from tests.trainer.served import oracle

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
ADAPTERS = {"code": 2, "math": 4}
"""Groups of the own batch of each adapter."""
ADDED_GROUPS = 2
GROUP_SIZE = 8
LEARNED = 12
"""Version of the weights that prefers what is rewarded."""
TOLERANCE = 1e-4
LOOK_S = 0.1
"""A look asks service and engine, which have work to do."""
TRAIN = """
from replaybuf.cli.main import main
from replaybuf_trainer.publishers import weights_folders
weights_folders.KEPT = 1 << 30  # the test compares what old versions sampled with their weights
main({arguments!r})
"""
WORDS = generated_words.__name__


class Versions:
    """The folders of all versions that the trainer wrote."""

    def __init__(self, base: Path, weights: Path) -> None:
        self._weights = weights
        self.reference = functools.cache(lambda name, version: merged(base, weights / name / f"v{version:06d}"))
        """Slow reference: the base model with the weights of an adapter's version merged into it."""

    def has(self, name: str, version: int) -> bool:
        return (self._weights / name / f"v{version:06d}").is_dir()

    def newest(self, name: str) -> int:
        """Return the newest version of an adapter; -1 for none."""
        return max(numbered_folders(self._weights / name, "v"), default=-1)


@contextlib.asynccontextmanager
async def trainer(run: RunClient, engine: str, model: Path, folder: Path) -> AsyncIterator[AwaitedProcess]:
    """Start `replaybuf train`, and kill it at the end if it still runs."""
    options = {
        "url": str(run.http.base_url),
        "run": run.run,
        "engine": engine,
        "model": str(model),
        "lora-rank": "8",
        "learning-rate": "1e-2",
        "warm-up-steps": "2",
        "weights-dir": str(folder / "weights"),
        "checkpoint-dir": str(folder / "checkpoints"),
        "metrics-file": str(folder / "train.jsonl"),
        "reader-options": '{"wait_ms": 500}',
        "checkpoint-every-steps": "1000",  # a checkpoint frees the groups before it
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    process = await AwaitedProcess(fork_program(TRAIN.format(arguments=["train", *arguments]), folder)).connect()
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def served(engine: EngineProcess) -> list[str]:
    return [card["id"] for card in engine.http.get("/v1/models").json()["data"]]


def own_groups(records: list[dict[str, Any]], adapter: str) -> list[dict[str, Any]]:
    """Check versions and order of an adapter's groups over all records; return them in order."""
    size = (ADAPTERS | {ADDED: ADDED_GROUPS})[adapter]
    shares = [sum(entry["adapter"] == adapter for entry in record["groups"]) for record in records]
    assert max(shares) <= size, "a share never crosses the end of an own batch"
    mine = [entry for record in records for entry in record["groups"] if entry["adapter"] == adapter]
    ages = [number // size - entry["policy_version"] for number, entry in enumerate(mine)]
    assert ages == [entry["staleness"] for entry in mine] and set(ages) <= {0, 1}
    indexes = [entry["prompt_index"] for entry in mine]
    assert len(set(indexes)) == len(indexes), "no prompt twice"
    return mine


def first_span(group: dict[str, Any]) -> tuple[int, int, int]:
    """Return the version that sampled the first tokens of a group's first rollout, and their ends."""
    rollout = group["rollouts"][0]
    # Tokens after a replacement depend on keys and values of both versions, which the reference has not.
    return tuple((rollout["version_spans"] or [(group["policy_version"], 0, len(rollout["completion_ids"]))])[0])


def check_sampled(versions: Versions, group: dict[str, Any]) -> int:
    """Check that a tenant's own weights of the recorded version sampled its first tokens; return the version."""
    name = group["adapter"]
    assert group["metadata"]["engine"]["model"] == name
    rollout = group["rollouts"][0]
    version, _, end = first_span(group)
    prompt, ids = rollout["prompt_ids"], rollout["completion_ids"][:end]
    sampled = pytest.approx(rollout["inference_logprobs"][:end], abs=TOLERANCE)
    assert oracle(versions.reference(name, version), prompt, ids) == sampled, (name, version)
    other = next(tenant for tenant in ADAPTERS if tenant != name)
    for wrong in ((other, version), (name, version - 2)):
        if version > 2 and versions.has(*wrong):  # the other tenant may not have come so far
            assert oracle(versions.reference(*wrong), prompt, ids) != sampled, (name, version, "fits too", wrong)
    return version


def wanted_share(model: Any, name: str, groups: list[dict[str, Any]]) -> float:
    """Return the probability of rewarded characters, on average over the first completions: no draw is in it."""
    wanted = character_tokenizer().convert_tokens_to_ids(list(WANTED[name]))
    shares = []
    for rollout in (group["rollouts"][0] for group in groups[:8]):
        ids = torch.tensor([[*rollout["prompt_ids"], *rollout["completion_ids"]]])
        with torch.inference_mode():
            probabilities = torch.softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        shares.append(probabilities[len(rollout["prompt_ids"]) - 1 : -1, wanted].sum(-1).mean().item())
    return float(np.mean(shares))


def test_two_tenants_learn_on_one_engine_while_a_third_is_added_and_one_is_removed(
    tmp_path: Path, run: RunClient, models: Path
) -> None:
    adapters = {name: {"groups_per_batch": size} for name, size in ADAPTERS.items()}
    batch = {"tokens_per_batch": 4096, "seq_len": 256}
    assert run.put(batch=batch, group_size=GROUP_SIZE, adapters=adapters).status_code == 201
    records: list[dict[str, Any]] = []
    groups: dict[str, dict[str, Any]] = {}
    versions = Versions(models / "a", tmp_path / "weights")

    async def until(what: str, condition: Callable[[], bool], *processes: AwaitedProcess) -> None:
        while not condition():
            ended = [process for process in processes if process.returncode is not None]
            assert not ended, (what, [(await process.communicate())[1] for process in ended])
            await asyncio.sleep(LOOK_S)

    def learned() -> bool:
        return all(versions.newest(name) >= LEARNED for name in ADAPTERS)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            engine = stack.enter_context(engine_process(models / "a"))
            training = await stack.enter_async_context(trainer(run, engine.url, models / "a", tmp_path))
            await until("version 0", lambda: served(engine) == ["policy", "code", "math"], training)

            async def start(name: str, prompts: str) -> AwaitedProcess:
                (tmp_path / name).mkdir()
                options = {"adapter": name, "tokenizer": str(models / "a"), "environment": f"{WORDS}:Share"}
                options |= {"prompts": f"{WORDS}:{prompts}"}
                started = generator(tmp_path / name, str(run.http.base_url), run.run, engine.url, **options)
                return await stack.enter_async_context(started)

            coder, mathematician = await start("code", "code"), await start("math", "math")
            alive = (training, mathematician)
            await until("learned", learned, *alive, coder)

            change = {"code": None, ADDED: {"groups_per_batch": ADDED_GROUPS}}
            assert run.http.patch(run.path, json={"adapters": change}).status_code == 200
            await until("changed", lambda: served(engine) == ["policy", "math", ADDED], *alive)
            poet = await start(ADDED, "poem")
            _, error = await coder.communicate()
            assert coder.returncode == 0, error.decode()
            await until("added", lambda: run.state()["adapters"][ADDED]["published_version"] >= 1, *alive, poet)
            acked = run.state()["step"]
            records.extend(run.get(f"batches/{step}/record").json() for step in range(acked))
            for entry in (entry for record in records for entry in record["groups"]):
                groups[entry["group_id"]] = run.get(f"groups/{entry['group_id']}").json()
            assert run.http.patch(run.path, json={"state": "finished"}).status_code == 200
            _, error = await training.communicate()
            assert training.returncode == 0, error.decode()

    bounded(main())
    base = load_model(models / "a")
    for name in (*ADAPTERS, ADDED):
        mine = [groups[entry["group_id"]] for entry in own_groups(records, name)]
        first_of_versions = {first_span(group)[0]: group for group in reversed(mine)}
        by_version = list(first_of_versions.values())
        # A merged model takes a third of a second.
        checked = {check_sampled(versions, group) for group in by_version[:: max(1, len(by_version) // 4)]}
        assert len(checked) > (2 if name in ADAPTERS else 0), name
        if name in ADAPTERS:
            learned_weights = versions.reference(name, versions.newest(name))
            before, after = (wanted_share(model, name, mine) for model in (base, learned_weights))
            assert after > 1.2 * before, (name, before, after)
    state = run.state()
    assert state["adapters"]["code"]["groups"]["live"] == 0
    under_way = {"unknown_adapter", "run_finished"}
    assert state["groups"]["rejected"].keys() <= under_way, "only groups under way at the removal or at the end"
    policies = [record for record in run.get("ledger", limit=1000).json()["records"] if record["type"] == "POLICY"]
    for name in (*ADAPTERS, ADDED):
        announced = [policy["version"] for policy in policies if policy["adapter"] == name]
        assert announced == list(range(1, len(announced) + 1)) and announced, name
