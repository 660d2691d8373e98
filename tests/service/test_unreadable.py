"""A run whose data cannot be read is left aside and named; the other runs of the server are served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import httpx
import msgspec
import pytest
import redis
from rich.console import Console

from replaybuf.cli.look.status import show_status
from replaybuf.cli.service import ServiceOptions
from replaybuf.service.host import Service
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.routes import application
from replaybuf.store import EmbeddedServer, Store, keys
from replaybuf.wire.ledger import TrimRecord, encode_record
from tests.conftest import RunClient, ServeProcess, group
from tests.waiting import eventually


def test_an_unreadable_run_does_not_stop_the_others(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient]
) -> None:
    """Every call of it says why, so do /readyz, the list of runs, `status` and the log; once mended it is served."""
    for name in ("good", "bad"):
        run = connect(own_service.url, name)
        run.put(batch={"groups_per_batch": 1})
        run.append(group("g"))
    own_service.kill()
    with redis.Redis(unix_socket_path=own_service.valkey_socket) as client:
        client.set(keys.snapshot("bad"), b"RBS2" + b"%020d" % 1 + b"xx")
        own_service.start()
        good, bad = (connect(own_service.url, name) for name in ("good", "bad"))
        why = "run bad cannot be read: the snapshot has format b'RBS2'; this release reads b'RBS4'"
        assert good.state()["groups"]["live"] == 1
        assert good.post("groups", groups=[group("h")]).status_code == 200
        for answer in (
            bad.http.get(bad.path),
            bad.put(batch={"groups_per_batch": 1}),
            bad.post("groups", groups=[group("h")]),
            bad.post("attach"),
        ):
            assert (answer.status_code, answer.json()["type"]) == (500, "urn:replaybuf:problem:unreadable")
            assert answer.json()["detail"].startswith(why)
        ready = good.http.get("/readyz")
        assert (ready.status_code, ready.json()["runs"]) == (200, ["good"])
        assert ready.json()["unreadable"]["bad"].startswith(why)
        listed = good.http.get("/v1/runs").json()
        assert [run["run"] for run in listed["runs"]] == ["good"] and listed["unreadable"] == ready.json()["unreadable"]
        console = Console(width=300)
        with console.capture() as shown:
            show_status(ServiceOptions(url=own_service.url), None, console)
        assert why in shown.get() and "run good" in shown.get()
        assert own_service.log().count(why) == 1
        client.delete(keys.snapshot("bad"))
        eventually(lambda: "bad" in good.http.get("/readyz").json()["runs"], within_s=20.0)
        assert good.http.get("/readyz").json()["unreadable"] == {}
    assert bad.state()["groups"]["live"] == 1
    eventually(lambda: "run is readable again run=bad" in own_service.log(), within_s=20.0)


def garbage(client: redis.Redis, run: str) -> None:
    client.xadd(keys.ledger(run), {"r": b"\xc1 no record"}, id="2-0")


def nameless(client: redis.Redis, run: str) -> None:
    client.xadd(keys.ledger(run), {"what": b"is this"}, id="2-0")


def of_a_later_release(client: redis.Redis, run: str) -> None:
    record = {"type": "CONFIG", "config": {"batch": {}, "novelty": 1}, "max_uses": 1}
    client.xadd(keys.ledger(run), {"r": msgspec.msgpack.encode(record)}, id="2-0")


def with_a_gap(client: redis.Redis, run: str) -> None:
    client.xadd(keys.ledger(run), {"r": encode_record(TrimRecord(groups=0, entries=0))}, id="3-0")


def emptied_index(client: redis.Redis, run: str) -> None:
    client.xadd(keys.ledger(run), {"r": encode_record(TrimRecord(groups=9, entries=0))}, id="2-0")


@pytest.mark.parametrize(
    ("spoil", "status", "why"),
    [
        (garbage, 500, "ledger entry 2 does not decode"),
        (nameless, 500, "ledger entry 2 does not decode"),
        (of_a_later_release, 500, "the configuration in ledger entry 2 .* unknown field `novelty`"),
        (with_a_gap, 503, "ledger entry 3 follows 1"),
        (emptied_index, 503, "ledger entry 2 names group 9"),
    ],
)
@pytest.mark.parametrize("running", [False, True])
def test_an_unreadable_run_is_reported_at_start_and_on_a_follower(
    server: EmbeddedServer, spoil: Callable[[redis.Redis, str], None], status: int, why: str, running: bool
) -> None:
    """Gaps may be a leader's trimming that was met in the middle: they are 503, and looked at again."""
    name = f"{spoil.__name__}-{running:d}".replace("_", "-")

    async def main() -> None:
        store = await Store.open(server.url)
        first_service = Service(store, url="http://made", embedded=False)
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(application(first_service, Tokens(None))), base_url="http://t"
        )
        for run_name in (name, f"{name}-good"):
            assert (await http.put(f"/v1/runs/{run_name}", json={"batch": {"groups_per_batch": 1}})).status_code == 201
        service = Service(store, url="http://t", embedded=False)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(application(service, Tokens(None))), base_url="http://t")
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            if running:
                client.persist(keys.lead(name))  # nobody renews the lease of the leader, and a follower would take it
                await service.start()
            spoil(client, name)
        if running:
            await service._work(service.runs[name], service.runs[name].read_streams)
            await service._discover()
        else:
            await service.start()
        assert name not in service.runs and f"{name}-good" in service.runs
        answer = await http.get(f"/v1/runs/{name}")
        assert answer.status_code == status
        assert re.match(f"run {name} cannot be read: {why}", answer.json()["detail"]), answer.text
        await store.close()

    asyncio.run(main())
