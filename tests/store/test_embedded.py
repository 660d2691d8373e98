"""The embedded Valkey: names of its data folder, failed starts and restarts."""

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
from replaybuf.store.redis import embedded as embedded_module
from tests.store.test_store import to_append

WITHIN_S = 20.0
POLL_S = 0.01
LONGEST_PAUSE_S = 0.3


def pid_of(embedded: EmbeddedServer) -> int | None:
    """Read the server's process id; None = it does not answer."""
    try:
        with redis.Redis(unix_socket_path=str(embedded.socket_path), retry=Retry(NoBackoff(), 0)) as client:
            return int(client.info("server")["process_id"])
    except (redis.ConnectionError, redis.TimeoutError):
        return None


def kill_valkey(embedded: EmbeddedServer) -> int:
    """Kill the server's process; return its id."""
    pid = pid_of(embedded)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


async def wait_for_restart(embedded: EmbeddedServer, dead_pid: int) -> None:
    """Wait until another process than the dead one answers."""
    async with asyncio.timeout(WITHIN_S):
        while await asyncio.to_thread(pid_of, embedded) in (None, dead_pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(POLL_S)


async def wait_for_answer(store: Store) -> list[int | None]:
    """Look up a group until Redis answers."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            with contextlib.suppress(ServiceUnavailable):
                return await store.groups.find_numbers("r", ["a"])
            await asyncio.sleep(POLL_S)


async def wait_for_refusal(store: Store, words: str) -> None:
    """Call Redis until the error contains `words`."""
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
    """Stored groups are there after a restart."""

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


def test_a_failed_start_reports_the_end_of_the_servers_log(tmp_path: Path) -> None:
    """The append-only file is broken."""
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


def test_a_server_that_died_on_a_full_disk_restarts_when_space_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the error of every call names the free and the needed bytes."""
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
            await wait_for_refusal(store, "is full: 4096 bytes are free, 16777216 are needed. Free disk space")
            monkeypatch.undo()
            assert await wait_for_answer(store) == [1]
        finally:
            watching.cancel()
            await store.close()
            await embedded.stop()

    asyncio.run(main())


def test_the_pause_before_each_restart_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start reads all data. The outage names how the server ended."""
    monkeypatch.setattr(embedded_module, "LONGEST_PAUSE_S", LONGEST_PAUSE_S)

    async def main() -> None:
        embedded = EmbeddedServer(tmp_path / "data")
        await embedded.start()
        watching = asyncio.create_task(embedded.watch())
        try:
            outages_s = []
            for _ in range(4):
                began_s = time.monotonic()
                await wait_for_restart(embedded, kill_valkey(embedded))
                outages_s.append(time.monotonic() - began_s)
                assert "the embedded Valkey ended with SIGKILL; the end of " in str(embedded.outage)
            assert min(outages_s[2:]) > LONGEST_PAUSE_S
        finally:
            watching.cancel()
            await embedded.stop()

    asyncio.run(main())
