"""How fast a run comes back: one million live groups, from the fold alone and from `serve` started on them.

    python benchmarks/rebuild.py --groups 1000000 --repeats 5

Groups are published by the library's own function, with tiny index entries but without payloads, which a rebuild does
not read. Told are: groups/s of reading and folding both streams in this process; seconds from the start of `serve` to
its line `listening`, with the run ready to serve (imports included; the Valkey is up already, as after a kill of the
service); memory per million groups in Redis and in the service.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import httpx
import msgspec
import numpy as np
from served import Served

from replaybuf.index import ENTRY
from replaybuf.service.journal import Journal
from replaybuf.store import Store, keys

RUN = "rebuild"
CHUNK_GROUPS = 5_000


def main() -> None:
    """Fill a run, rebuild it again and again, print median and spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as server:
        empty_started_s, empty_rss = server.started_s, server.rss_bytes
        batch = {"groups_per_batch": 512, "tokens_per_batch": None}
        httpx.put(f"{server.url}/v1/runs/{RUN}", json={"batch": batch}).raise_for_status()
        with server.redis() as client:
            client.config_set("appendfsync", "no")  # filling is not what is measured
            before = client.info("memory")["used_memory"]
        server.kill()
        asyncio.run(fill(f"unix://{server.folder}/valkey.sock", options.groups))
        rates, index_bytes = asyncio.run(fold(f"unix://{server.folder}/valkey.sock", options.repeats))
        tell("fold: groups/s", rates)
        started, resident = [], []
        for _ in range(options.repeats):
            server.start()
            state = httpx.get(f"{server.url}/v1/runs/{RUN}").raise_for_status().json()
            if state["groups"]["live"] != options.groups:
                raise RuntimeError(f"{state['groups']['live']} of {options.groups} groups are live")
            started.append(server.started_s)
            resident.append((server.rss_bytes - empty_rss) / 1e6)
            server.kill()
        server.start()
        tell("serve: s to ready", started)
        print(f"serve on no run: {empty_started_s:.2f} s to ready, {empty_rss / 1e6:.0f} MB resident")
        tell("serve: MB resident more", resident)
        with server.redis() as client:
            print(f"redis: {(client.info('memory')['used_memory'] - before) / 1e6:.0f} MB more, of which index stream")
            for key in (keys.index(RUN), keys.group_ids(RUN)):
                print(f"  {key}: {client.memory_usage(key, samples=1000) / 1e6:.0f} MB")
        print(f"index columns: {index_bytes / 1e6:.0f} MB")


def tell(what: str, figures: list[float]) -> None:
    """Print median and spread."""
    print(f"{what}: {statistics.median(figures):,.4g} ({min(figures):,.4g} to {max(figures):,.4g})", flush=True)


async def fill(url: str, groups: int) -> None:
    """Publish live groups of tickets, without payloads."""
    store = await Store.open(url)
    done = keys.prompts_done(RUN, "")
    names = [keys.index(RUN), keys.group_ids(RUN), keys.counts(RUN), keys.fence(RUN), done, done]
    for start in range(0, groups, CHUNK_GROUPS):
        indexes = np.arange(start, min(start + CHUNK_GROUPS, groups))
        entries = np.zeros(len(indexes), ENTRY)
        entries["prompt_index"], entries["tokens"], entries["rollouts"], entries["longest_tokens"] = indexes, 10, 2, 5
        pipe = store._redis.pipeline(transaction=False)
        for position, index in enumerate(indexes.tolist()):
            name, lengths = f"p{index}", b"\5\0\0\0\5\0\0\0"
            strings = [name, f"task/{index}", "", f"rb:p:{{{RUN}:{name}}}:0123456789abcdef", f"t0-{index}-1", lengths]
            values = entries[position : position + 1].tobytes()
            packed = msgspec.msgpack.encode(strings)
            pipe.fcall("rb_publish", len(names), *names, "", name, name, values, packed, index, index)
        await pipe.execute()
    await store.close()


async def fold(url: str, repeats: int) -> tuple[list[float], int]:
    """Rebuild the state in this process; groups/s of each time, bytes of the index."""
    store = await Store.open(url)
    rates, size = [], 0
    for _ in range(repeats):
        journal = Journal(RUN, store, time.time)
        begun = time.perf_counter()
        await journal.load()
        rates.append(journal.state.stored / (time.perf_counter() - begun))
        size = journal.state.index.nbytes
    await store.close()
    return rates, size


if __name__ == "__main__":
    main()
