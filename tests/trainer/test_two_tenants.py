"""Two LoRA tenants on real processes: service, two small engines, two generators, and a stand-in for the trainer.

The reference trainer trains no adapters yet, so the stand-in loads each engine and publishes versions per adapter.
Every engine serves one adapter, because its weight version must be that of the adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_generate import generator
from tests.conftest import RunClient
from tests.trainer.engine_process import TIMEOUT_S, EngineProcess, bounded, engine_process

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
ADAPTERS = {"code": 1, "math": 2}
"""Groups of the own batch of each adapter."""
BOTH, ALONE = 6, 3
"""Steps with both adapters, and steps after one was removed."""
HERE = __name__


def words() -> list[dict[str, str]]:
    """Prompts of the character tokenizer."""
    return [{"prompt": word, "answer": word[::-1]} for word in ("culla>", "parla>", "luna>", "sole>", "mare>", "neve>")]


def train(run: RunClient, epoch: int, step: int, engines: dict[str, EngineProcess]) -> dict[str, Any]:
    """Train one step: load the engines of the completed adapters, then publish; return the record."""
    while (response := run.batch(step, epoch, wait_ms=5000)).status_code == 202:
        pass
    assert response.status_code == 200, response.text
    record: dict[str, Any] = run.get(f"batches/{step}/record").json()
    assert run.ack(step, epoch).status_code == 200
    for adapter, own_step in record["adapters_completed"].items():
        loaded = engines[adapter].post("/update_weight_version", new_version=str(own_step + 1))
        assert loaded.status_code == 200, loaded.text
        published = run.post("policy", epoch=epoch, version=own_step + 1, adapter=adapter)
        assert published.status_code == 200, published.text
    return record


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


def test_two_tenants_progress_in_turns_and_one_is_removed_while_they_run(
    tmp_path: Path, run: RunClient, models: Path
) -> None:
    adapters = {name: {"groups_per_batch": size} for name, size in ADAPTERS.items()}
    batch = {"tokens_per_batch": 4096, "seq_len": 256}
    assert run.put(batch=batch, group_size=2, adapters=adapters).status_code == 201

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            engines = {name: stack.enter_context(engine_process(models / "a", name)) for name in ADAPTERS}
            processes = {}
            for name, engine in engines.items():
                (tmp_path / name).mkdir()
                options = {"adapter": name, "tokenizer": str(models / "a"), "prompts": f"{HERE}:words"}
                started = generator(tmp_path / name, str(run.http.base_url), run.run, engine.url, **options)
                processes[name] = await stack.enter_async_context(started)
            epoch = run.attach()
            records = [await asyncio.to_thread(train, run, epoch, step, engines) for step in range(BOTH)]
            progress = {name: check(records, name) for name in ADAPTERS}
            assert all(progress.values()), progress
            removed = run.http.patch(run.path, json={"adapters": {"code": None}})
            assert removed.status_code == 200, removed.text
            _, error = await processes["code"].communicate()
            assert processes["code"].returncode == 0, error.decode()
            rest = [await asyncio.to_thread(train, run, epoch, step, engines) for step in range(BOTH, BOTH + ALONE)]
            assert check(records + rest, "math") > progress["math"]
            own = {entry["adapter"] for record in rest[1:] for entry in record["groups"]}
            assert own == {"math"}, "at most the batch that was assembled before holds the removed adapter"

    bounded(main())
    state = run.state()
    assert state["adapters"]["code"]["groups"]["live"] == 0
    assert state["groups"]["rejected"].keys() <= {"unknown_adapter"}, "only a group that was under way at the removal"
    policies = [one for one in run.get("ledger", limit=1000).json()["records"] if one["type"] == "POLICY"]
    for name in ADAPTERS:
        versions = [one["version"] for one in policies if one["adapter"] == name]
        assert versions == list(range(1, len(versions) + 1)) and versions, name
