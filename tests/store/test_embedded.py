"""The embedded Valkey by itself: where its folder may lie, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from replaybuf.errors import ServiceUnavailable
from replaybuf.store import EmbeddedServer, Store
from replaybuf.store import embedded as embedded_module
from tests.store.test_store import to_append

WITHIN_S = 20.0
POLL_S = 0.01
LONGEST_PAUSE_S = 0.6


def pid_of(embedded: EmbeddedServer) -> int | None:
    """Ask the server for its process id; None where it does not answer."""
    try:
        with redis.Redis(unix_socket_path=str(embedded.socket_path), retry=Retry(NoBackoff(), 0)) as client:
            return int(client.info("server")["process_id"])
    except (redis.ConnectionError, redis.TimeoutError):
        return None


def kill_valkey(embedded: EmbeddedServer) -> int:
    """Kill the server's process; return which it was."""
    pid = pid_of(embedded)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


async def another_one(embedded: EmbeddedServer, dead_pid: int) -> None:
    """Wait until the server answers as another process than the dead one."""
    async with asyncio.timeout(WITHIN_S):
        while await asyncio.to_thread(pid_of, embedded) in (None, dead_pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(POLL_S)


async def answered(store: Store) -> list[int | None]:
    """Ask for a group until Redis answers."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            with contextlib.suppress(ServiceUnavailable):
                return await store.groups.find_numbers("r", ["a"])
            await asyncio.sleep(POLL_S)


async def refused(store: Store, words: str) -> None:
    """Ask until the refusal holds these words."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await store.groups.find_numbers("r", ["a"])
            except ServiceUnavailable as error:
                if words in error.detail:
                    return
            await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("name", ["with space", "quo'te\"s", "per%20cent?#", "ümlaut", "long " * 30])
def test_a_data_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """What is stored in it is there after a restart."""

    async def main() -> None:
        for stored in (True, False):
            embedded = EmbeddedServer(tmp_path / name)
            await embedded.start()
            store = await Store.open(embedded.url)
            try:
                (result,) = await store.groups.append("r", [to_append("a")], {"": 0}, time.time())
                assert (result.stored, result.number) == (stored, 1)
            finally:
                await store.close()
                await embedded.stop()

    asyncio.run(main())


def test_a_server_that_does_not_start_is_told_with_its_own_last_words(tmp_path: Path) -> None:
    """Here its append-only file is broken."""
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest\n")

    async def main() -> None:
        embedded = EmbeddedServer(tmp_path)
        with pytest.raises(ServiceUnavailable, match=r"ended with exit code 1.*manifest"):
            try:
                await embedded.start()
            finally:
                await embedded.stop()

    asyncio.run(main())


def test_a_server_that_died_on_a_full_disk_is_started_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then every call says how much is free, how much is needed, and that nothing else is to be done."""
    disk = shutil.disk_usage(tmp_path)

    async def main() -> None:
        embedded = EmbeddedServer(tmp_path / "data")
        await embedded.start()
        store = await Store.open(embedded.url, explain_outage=lambda: embedded.outage)
        watching = asyncio.create_task(embedded.watch())
        try:
            await store.groups.append("r", [to_append("a")], {"": 0}, time.time())
            monkeypatch.setattr("shutil.disk_usage", lambda _: disk._replace(free=4096))
            kill_valkey(embedded)
            await refused(store, "is full: 4096 bytes are free, 16777216 are needed. Make room there")
            monkeypatch.undo()
            assert await answered(store) == [1]
        finally:
            watching.cancel()
            await store.close()
            await embedded.stop()

    asyncio.run(main())


def test_a_server_that_keeps_dying_is_started_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start reads all its data. It is told how it ended."""
    monkeypatch.setattr(embedded_module, "LONGEST_PAUSE_S", LONGEST_PAUSE_S)

    async def main() -> None:
        embedded = EmbeddedServer(tmp_path / "data")
        await embedded.start()
        watching = asyncio.create_task(embedded.watch())
        try:
            away_s = []
            for _ in range(4):
                began_s = time.monotonic()
                await another_one(embedded, kill_valkey(embedded))
                away_s.append(time.monotonic() - began_s)
                assert "the embedded Valkey ended with SIGKILL; the end of " in str(embedded.outage)
            assert min(away_s[2:]) > LONGEST_PAUSE_S
        finally:
            watching.cancel()
            await embedded.stop()

    asyncio.run(main())
