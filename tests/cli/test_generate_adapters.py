"""`replaybuf generate --adapter` as a process: only the adapter's tickets, engine and versions."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_generate import STOP_S, bounded, generator
from tests.conftest import RunClient
from tests.forked import AwaitedProcess
from tests.generator.doubles import EngineDouble, Gate

ADAPTERS = {"code": {"groups_per_batch": 1}, "math": {"groups_per_batch": 2}}
PROMPTS = {"code": 3, "math": 6}


def put(run: RunClient, **config: Any) -> None:
    """Create a run whose adapters have prompts for three batches each."""
    adapters = {name: own | {"prompts": PROMPTS[name]} for name, own in ADAPTERS.items()}
    batch = {"tokens_per_batch": 512, "seq_len": 64}
    assert run.put(**{"batch": batch, "group_size": 4, "adapters": adapters} | config).status_code == 201


@contextlib.asynccontextmanager
async def generating(folder: Path, run: RunClient, adapter: str, engine: EngineDouble) -> AsyncIterator[AwaitedProcess]:
    """Serve an adapter with its own engine, and generate for it in a process."""
    url, own = str(run.http.base_url), folder / adapter
    own.mkdir()
    async with engine.up(), generator(own, url, run.run, engine.url, adapter=adapter) as process:
        yield process


def train(run: RunClient, engines: dict[str, EngineDouble]) -> list[dict[str, Any]]:
    """Train until the run is finished, publish per adapter, and return the batch records."""
    epoch = run.attach()
    records: list[dict[str, Any]] = []
    while (response := run.batch(len(records), epoch, wait_ms=20_000)).status_code != 410:
        assert response.status_code == 200, response.text
        record = run.get(f"batches/{len(records)}/record").json()
        assert run.ack(len(records), epoch).status_code == 200
        for adapter, own_step in record["adapters_completed"].items():
            engines[adapter].version = own_step + 1  # the engine has the weights before the version is announced
            published = run.post("policy", epoch=epoch, version=own_step + 1, adapter=adapter)
            assert published.status_code == 200, published.text
        records.append(record)
    return records


def test_each_adapter_is_sampled_by_its_engine_with_its_own_versions(tmp_path: Path, run: RunClient) -> None:
    """Two generators, two engines and one trainer, until both prompt supplies end; both exit codes are 0."""
    put(run)
    engines = {name: EngineDouble(model=name) for name in ADAPTERS}

    async def main() -> None:
        async with (
            generating(tmp_path, run, "code", engines["code"]) as code,
            generating(tmp_path, run, "math", engines["math"]) as math,
        ):
            records = await asyncio.to_thread(train, run, engines)
            for process in (code, math):
                _, error = await process.communicate()
                assert process.returncode == 0, error.decode()
        used = [entry for record in records for entry in record["groups"]]
        for name, own in ADAPTERS.items():
            mine = [entry for entry in used if entry["adapter"] == name]
            assert sorted(entry["prompt_index"] for entry in mine) == list(range(PROMPTS[name]))
            versions = [entry["policy_version"] for entry in mine]
            own_steps = [number // own["groups_per_batch"] for number in range(len(mine))]
            ages = [step - version for step, version in zip(own_steps, versions, strict=True)]
            assert ages == [entry["staleness"] for entry in mine] and max(ages) <= 1
            assert max(versions) > 0, "the published version of the adapter was followed"

    bounded(main())
    for name, engine in engines.items():
        assert {request["model"] for request in engine.requests} == {name}
    state = run.state()
    assert state["groups"]["rejected"] == {}
    assert (state["tickets"]["out"], state["tickets"]["failed"]) == (0, 0)
    assert {name: state["adapters"][name]["groups"]["stored"] for name in ADAPTERS} == PROMPTS


def test_the_end_of_one_adapters_prompts_ends_only_its_generator(tmp_path: Path, run: RunClient) -> None:
    put(run, strategy={"options": {"max_staleness": 9}})

    async def main() -> None:
        async with generating(tmp_path, run, "math", EngineDouble(model="math")) as process:
            _, error = await process.communicate()
            assert process.returncode == 0, error.decode()

    bounded(main())
    state = run.state()
    assert (state["state"], state["adapters"]["math"]["groups"]["stored"]) == ("running", PROMPTS["math"])


def test_a_signal_returns_the_tickets_of_the_adapter(tmp_path: Path, run: RunClient) -> None:
    """The ticket ids start with the adapter's name and a slash."""
    put(run)

    async def main() -> None:
        gate, engine = Gate(), EngineDouble(model="math")
        engine.always = gate
        async with generating(tmp_path, run, "math", engine) as process:
            await gate.requests(2)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(STOP_S):
                _, error = await process.communicate()
            assert process.returncode == 0, error.decode()
            gate.open.set()

    bounded(main())
    state = run.state()
    assert state["adapters"]["math"]["tickets_out"] == 0
    assert state["tickets"]["returned"] == state["tickets"]["issued"] > 0


@pytest.mark.parametrize(
    ("adapters", "asked", "message"),
    [
        (ADAPTERS, {}, "adapter is ''; the run has ['code', 'math']"),
        (ADAPTERS, {"adapter": "poetry"}, "adapter is 'poetry'; the run has ['code', 'math']"),
        ({}, {"adapter": "math"}, "adapter is 'math'; the run has no adapters"),
        (ADAPTERS, {"adapter": "math"}, "serves ['tiny']; the requested model is 'math'"),
    ],
)
def test_an_unknown_adapter_ends_it_at_once_with_one_message(
    tmp_path: Path, run: RunClient, adapters: dict[str, Any], asked: dict[str, str], message: str
) -> None:
    put(run, adapters=adapters)

    async def main() -> None:
        url = str(run.http.base_url)
        async with EngineDouble().up() as engine, generator(tmp_path, url, run.run, engine.url, **asked) as process:
            _, error = await process.communicate()
            assert process.returncode == 1
            last = error.decode().splitlines()[-1]
            assert last.startswith("replaybuf: ") and message in last

    bounded(main())
    assert run.state()["tickets"]["issued"] == 0


def test_the_option_model_names_the_served_adapter(tmp_path: Path, run: RunClient) -> None:
    """For an engine that has merged the adapter, or serves it under another name."""
    put(run, strategy={"options": {"max_staleness": 9}})

    async def main() -> None:
        engine, url = EngineDouble(model="merged"), str(run.http.base_url)
        async with (
            engine.up(),
            generator(tmp_path, url, run.run, engine.url, adapter="math", model="merged") as process,
        ):
            _, error = await process.communicate()
            assert process.returncode == 0, error.decode()
        assert {request["model"] for request in engine.requests} == {"merged"}

    bounded(main())
    assert run.state()["adapters"]["math"]["groups"]["stored"] == PROMPTS["math"]
