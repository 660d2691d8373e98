"""Two LoRA tenants on real processes: the service, one small engine, a generator per tenant, a stand-in trainer.

The reference trainer trains no adapters yet. So the stand-in writes an adapter folder per version, loads it into the
engine in place and publishes the version.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_generate import generator
from tests.conftest import RunClient
from tests.trainer.adapter_folders import merged, write_adapter
from tests.trainer.engine_process import TIMEOUT_S, EngineProcess, bounded, engine_process
from tests.trainer.served import oracle

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
ADAPTERS = {"code": 1, "math": 2}
"""Groups of the own batch of each adapter."""
ALONE = 3
"""Steps after one adapter was removed."""
TOLERANCE = 1e-4
HERE = __name__


def words() -> list[dict[str, str]]:
    """Prompts of the character tokenizer."""
    return [{"prompt": word, "answer": word[::-1]} for word in ("culla>", "parla>", "luna>", "sole>", "mare>", "neve>")]


class Tenants:
    """The stand-in trainer: it writes, loads and publishes the adapters of the run."""

    def __init__(self, run: RunClient, engine: EngineProcess, base: Path, folder: Path) -> None:
        self._run, self._engine, self._base, self._folder = run, engine, base, folder
        self._epoch = run.attach()
        self.reference = functools.cache(lambda name, version: merged(base, self.path(name, version)))
        """Slow reference: the base model with the weights of an adapter's version merged into it."""

    def path(self, name: str, version: int) -> Path:
        """Return the folder of an adapter's version."""
        return self._folder / name / f"v{version}"

    def load(self, name: str, version: int) -> None:
        """Write new weights of an adapter and load them into the engine under their version."""
        folder = write_adapter(self.path(name, version), self._base, seed=2 * version + (name == "math"))
        loaded = self._engine.post(
            "/v1/load_lora_adapter",
            lora_name=name,
            lora_path=str(folder),
            load_inplace=version > 0,
            weight_version=version,
        )
        assert loaded.status_code == 200, loaded.text

    def train(self, step: int) -> dict[str, Any]:
        """Train one step and publish the adapters that it completed; return its record with the groups it drew."""
        while (response := self._run.batch(step, self._epoch, wait_ms=5000)).status_code == 202:
            pass
        assert response.status_code == 200, response.text
        record: dict[str, Any] = self._run.get(f"batches/{step}/record").json()
        assert self._run.ack(step, self._epoch).status_code == 200
        for name, own_step in record["adapters_completed"].items():
            self.load(name, own_step + 1)
            weights = {"weights_uri": self.path(name, own_step + 1).as_uri()}
            published = self._run.post("policy", epoch=self._epoch, version=own_step + 1, adapter=name, **weights)
            assert published.status_code == 200, published.text
        return record


def trained_on_new_weights(records: list[dict[str, Any]]) -> bool:
    """Return whether each adapter has trained a group that its published weights sampled."""
    entries = [entry for record in records for entry in record["groups"]]
    return {entry["adapter"] for entry in entries if entry["policy_version"] > 0} == ADAPTERS.keys()


def check(records: list[dict[str, Any]], adapter: str) -> int:
    """Check versions and order of an adapter's groups over all records; return the number of its groups."""
    shares = [sum(entry["adapter"] == adapter for entry in record["groups"]) for record in records]
    assert max(shares) <= ADAPTERS[adapter], "a share never crosses the end of an own batch"
    mine = [entry for record in records for entry in record["groups"] if entry["adapter"] == adapter]
    own_steps = [number // ADAPTERS[adapter] for number in range(len(mine))]
    ages = [step - entry["policy_version"] for step, entry in zip(own_steps, mine, strict=True)]
    assert ages == [entry["staleness"] for entry in mine] and set(ages) <= {0, 1}
    indexes = [entry["prompt_index"] for entry in mine]
    assert len(set(indexes)) == len(indexes), "no prompt twice"
    return len(mine)


def check_sampled(tenants: Tenants, group: dict[str, Any]) -> set[int]:
    """Check that a tenant's own weights of the recorded version sampled its tokens, and that no others did."""
    name = group["adapter"]
    other = next(one for one in ADAPTERS if one != name)
    assert group["metadata"]["engine"]["model"] == name
    versions = set()
    for rollout in group["rollouts"]:
        # Tokens after a replacement depend on keys and values of both versions, which the reference has not.
        spans = rollout["version_spans"] or [(group["policy_version"], 0, len(rollout["completion_ids"]))]
        version, _, end = spans[0]
        prompt, ids = rollout["prompt_ids"], rollout["completion_ids"][:end]
        sampled = pytest.approx(rollout["inference_logprobs"][:end], abs=TOLERANCE)
        assert oracle(tenants.reference(name, version), prompt, ids) == sampled, (name, version)
        assert oracle(tenants.reference(other, 0), prompt, ids) != sampled, "another tenant's weights fit too"
        versions.add(version)
    return versions


def test_one_engine_samples_two_tenants_with_their_own_weights_and_one_is_removed_while_they_run(
    tmp_path: Path, run: RunClient, models: Path
) -> None:
    adapters = {name: {"groups_per_batch": size} for name, size in ADAPTERS.items()}
    batch = {"tokens_per_batch": 4096, "seq_len": 256}
    assert run.put(batch=batch, group_size=2, adapters=adapters).status_code == 201
    sampled: dict[str, set[int]] = {name: set() for name in ADAPTERS}

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            engine = stack.enter_context(engine_process(models / "a"))
            tenants = Tenants(run, engine, models / "a", tmp_path / "weights")
            processes = {}
            for name in ADAPTERS:
                tenants.load(name, 0)
                (tmp_path / name).mkdir()
                options = {"adapter": name, "tokenizer": str(models / "a"), "prompts": f"{HERE}:words"}
                started = generator(tmp_path / name, str(run.http.base_url), run.run, engine.url, **options)
                processes[name] = await stack.enter_async_context(started)
            records: list[dict[str, Any]] = []
            while not trained_on_new_weights(records):
                records.append(await asyncio.to_thread(tenants.train, len(records)))
            progress = {name: check(records, name) for name in ADAPTERS}

            removed = run.http.patch(run.path, json={"adapters": {"code": None}})
            assert removed.status_code == 200, removed.text
            _, error = await processes["code"].communicate()
            assert processes["code"].returncode == 0, error.decode()
            assert engine.post("/v1/unload_lora_adapter", lora_name="code").status_code == 200
            steps = range(len(records), len(records) + ALONE)
            rest = [await asyncio.to_thread(tenants.train, step) for step in steps]
            assert check(records + rest, "math") > progress["math"]
            own = {entry["adapter"] for record in rest[1:] for entry in record["groups"]}
            assert own == {"math"}, "at most the batch that was assembled before holds the removed adapter"
            assert [card["id"] for card in engine.http.get("/v1/models").json()["data"]] == ["policy", "math"]

            for entry in (entry for record in records + rest for entry in record["groups"]):
                group = run.get(f"groups/{entry['group_id']}").json()
                sampled[entry["adapter"]] |= check_sampled(tenants, group)

    bounded(main())
    assert all(len(versions) > 1 for versions in sampled.values()), sampled
    state = run.state()
    assert state["adapters"]["code"]["groups"]["live"] == 0
    assert state["groups"]["rejected"].keys() <= {"unknown_adapter"}, "only a group that was under way at the removal"
    policies = [one for one in run.get("ledger", limit=1000).json()["records"] if one["type"] == "POLICY"]
    for name in ADAPTERS:
        versions = [one["version"] for one in policies if one["adapter"] == name]
        assert versions == list(range(1, len(versions) + 1)) and versions, name
