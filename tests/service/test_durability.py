"""Durability over HTTP: reported levels, missing replicas, a full Redis, a read-only Redis."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis

from replaybuf.cli.look.status import show_status
from replaybuf.cli.service import ServiceOptions
from replaybuf.client.client import Client
from replaybuf.store import EmbeddedServer
from replaybuf.wire.group import GroupJson, group_from_json
from tests.conftest import RunClient, ServeProcess, Starter, group
from tests.forked import run_forked
from tests.service.test_restart import valkey_of
from tests.service.test_server import metric
from tests.valkeys import Valkey
from tests.waiting import eventually, patience

Connect = Callable[[str, str], RunClient]
WITHIN_S = 15.0


def ready(service: ServeProcess) -> dict[str, Any]:
    """Read `/readyz`."""
    answer: dict[str, Any] = httpx.get(f"{service.url}/readyz").json()
    return answer


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServeProcess]]:
    """Start services with options of the test's own."""
    started: list[ServeProcess] = []

    def start(*options: str) -> ServeProcess:
        started.append(ServeProcess(tmp_path / f"service{len(started)}", *options))
        return started[-1].start()

    yield start
    for service in started:
        service.end()


# ---------------------------------------------------------------------- levels


@pytest.mark.parametrize(
    ("config", "options", "level", "met_by", "warning"),
    [
        ({}, (), "strict", "appendfsync always", None),
        ({"appendfsync": "everysec"}, ("--durability", "relaxed"), "relaxed", "appendfsync everysec", None),
        ({"appendonly": "no"}, (), "relaxed", "appendonly no", "set appendonly yes"),
    ],
)
def test_the_durability_level_is_reported_everywhere(
    tmp_path: Path,
    serve: Callable[..., ServeProcess],
    connect: Connect,
    config: dict[str, str],
    options: tuple[str, ...],
    level: str,
    met_by: str,
    warning: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`/readyz` (always 200), run state, metric, `status`, and a warning in the log where it is less than wanted.

    The level of all settings is in tests/store/test_durability.py.
    """
    with Valkey(tmp_path / "v", **config) as server:
        service = serve("--redis-url", server.url, *options)
        answer = ready(service)
        assert (answer["status"], answer["durability"], answer["durability_met_by"]) == ("ready", level, met_by)
        assert answer["durability_wanted"] == ("relaxed" if options else "strict")
        run = connect(service.url, "r")
        run.put(batch={"groups_per_batch": 1})
        assert run.append(group("a"))[0]["status"] == "stored"
        assert run.state()["durability"] == level
        assert metric(run.http.get("/metrics").text, "replaybuf_durability_strict") == (level == "strict")
        show_status(ServiceOptions(url=service.url), None)
        assert f"durability {level} ({met_by})" in capsys.readouterr().out.replace("\n", " ")
        warnings = re.findall(r"WARNING .*durability is (.*)", service.log())
        assert bool(warnings) == (warning is not None)
        if warning:
            assert warning in warnings[0] and warning in answer["durability_reasons"][0]


def test_the_embedded_server_gets_the_requested_level_also_when_adopted(
    tmp_path: Path, serve: Callable[..., ServeProcess], started: Starter
) -> None:
    """A relaxed Valkey that a killed `serve` left running becomes strict under the next one."""
    relaxed = started(ServeProcess(tmp_path / "service0", "--durability", "relaxed"))
    answer = ready(relaxed)
    assert (answer["durability"], answer["durability_met_by"]) == ("relaxed", "appendfsync everysec")
    relaxed.kill()
    answer = ready(serve())
    assert (answer["durability"], answer["durability_met_by"]) == ("strict", "appendfsync always")


def test_replicas_of_the_embedded_server_are_rejected(tmp_path: Path) -> None:
    """It has none, so no write could ever be confirmed."""
    refused = run_forked("replaybuf", ["serve", "--port", "0", "--data-dir", str(tmp_path), "--wait-replicas", "1"])
    assert refused.returncode == 1
    assert "wait_replicas is 1; the embedded Valkey has no replicas" in refused.stderr


# ---------------------------------------------------------------------- replicas


def test_a_write_that_a_stopped_replica_does_not_confirm_is_answered_not_durable(
    tmp_path: Path, serve: Callable[..., ServeProcess], connect: Connect
) -> None:
    """503 within the timeout, with what was reached and what is needed; once it goes on, the repeat is fine."""
    with Valkey(tmp_path / "primary", appendfsync="everysec") as primary, Valkey(tmp_path / "replica") as replica:
        replica.replicate(primary)
        service = serve("--redis-url", primary.url, "--wait-replicas", "1", "--wait-timeout-s", "0.7")
        answer = ready(service)
        assert (answer["durability_met_by"], answer["replicas"], answer["wait_replicas"]) == (
            "WAITAOF 1 0 and WAIT 1",
            1,
            1,
        )
        run = connect(service.url, "r")
        epoch = 0
        for call in (  # a slow disk may take longer than the time-out
            lambda: run.put(batch={"groups_per_batch": 1}),
            lambda: run.post("groups", **group("before")),
            lambda: run.post("attach", dp_world_size=1),
        ):
            answered = eventually(call, WITHIN_S, lambda reply: reply.is_success)
            epoch = answered.json().get("epoch", 0)
        replica.signal(signal.SIGSTOP)
        started = time.monotonic()
        refused = run.post("groups", **group("during"))
        assert time.monotonic() - started < 5 * patience()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        problem = refused.json()
        assert problem["type"] == "urn:replaybuf:problem:not-durable"
        assert (problem["value"]["replicas"], problem["bound"]["replicas"]) == (0, 1)
        assert run.post("groups", **group("during")).status_code == 503
        for _ in range(2):  # the first is written, the second finds it by reading: neither is acted on
            assert run.batch(0, epoch).status_code == 503
        assert run.state()["step"] == 0
        shown = [record["type"] for record in run.get("ledger").json()["records"]]
        assert "ATTACH" in shown and "BATCH" not in shown, "nobody sees a record that may be lost"
        replica.signal(signal.SIGCONT)
        eventually(lambda: run.post("groups", **group("during")).status_code == 200, WITHIN_S)
        both = {"groups": [group("during"), group("after")]}
        eventually(lambda: run.post("groups", **both).status_code == 200, WITHIN_S)
        assert [result["status"] for result in run.append(*both["groups"])] == ["duplicate"] * 2
        for step in range(2):
            run.ready_batch(step, epoch)
            eventually(lambda step=step: run.ack(step, epoch).is_success, WITHIN_S)  # type: ignore[misc]
            eventually(lambda step=step: run.publish(step + 1, epoch).is_success, WITHIN_S)  # type: ignore[misc]
        text = run.http.get("/metrics").text
        assert metric(text, "replaybuf_writes_unconfirmed_total") >= 3
        assert metric(text, "replaybuf_replicas_confirmed") == 1
        duplicates = metric(text, "replaybuf_groups_duplicate_total", run="r")
        service.stop()
        service.start()
        text = httpx.get(f"{service.url}/metrics").text
        assert metric(text, "replaybuf_groups_duplicate_total", run="r") >= duplicates >= 2


# ---------------------------------------------------------------------- out of memory


def big(name: str | None, **fields: Any) -> dict[str, Any]:
    """Build a group of some 0.5 MB."""
    return group(name, rollouts=8, tokens=8000, **fields)


def test_a_full_redis_rejects_groups_until_the_trainer_frees_memory(
    own_service: ServeProcess, connect: Connect
) -> None:
    """429 for producers; attach, tickets, acks, versions, counts and checkpoints go on; what is freed takes groups."""
    run = connect(own_service.url, "r")
    run.put(
        batch={"groups_per_batch": 2, "tokens_per_batch": None, "seq_len": 8192},
        strategy={"options": {"max_staleness": 20}},
    )
    ticket = run.post("tickets", producer="p", count=1).json()["tickets"][0]["ticket"]
    with redis.Redis(unix_socket_path=str(EmbeddedServer(own_service.data_dir).socket_path)) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (8 << 20))
        stored: list[str] = []
        for number in range(100):
            refused = run.post("groups", **big(f"g{number}"))
            if refused.status_code != 200:
                break
            stored.append(f"g{number}")
        assert (refused.status_code, refused.json()["type"]) == (429, "urn:replaybuf:problem:no-room")
        assert int(refused.headers["retry-after"]) >= 1
        assert len(stored) >= 4
        client.config_set("maxmemory", 1)  # not a byte left

        assert run.append(group("bad", version=9))[0]["status"] == "rejected"
        assert run.http.delete(f"{run.path}/tickets/{ticket}").status_code == 200
        assert len(run.post("tickets", producer="p", count=2).json()["tickets"]) == 2
        assert connect(own_service.url, "other").put(batch={"groups_per_batch": 1}).status_code == 429
        assert ready(own_service)["status"] == "ready"
        epoch = run.attach()
        bodies = run.train(epoch, range(2))
        assert all(run.batch(step, epoch).content == body for step, body in enumerate(bodies))
        before = client.info("memory")["used_memory"]
        client.config_set("maxmemory", before)

        with Client(own_service.url, "r", retry_for_s=30) as producer:
            appended: list[Any] = []
            late_group = group_from_json(msgspec.convert(big("late"), GroupJson))
            late = threading.Thread(target=lambda: appended.extend(producer.append([late_group])))
            late.start()
            assert run.post("checkpoints", epoch=epoch, step=2).status_code == 200
            late.join()
        assert [result.status for result in appended] == ["stored"]
        assert client.info("memory")["used_memory"] < before
        states = {name: run.get(f"groups/{name}").json() for name in [*stored, "late"]}
        assert {name for name, state in states.items() if state["state"] == "retired"} == set(stored[:4])
        assert all(states[name]["rollouts"] is not None for name in [*stored[4:], "late"])
        assert sum(1 for _ in client.scan_iter("rb:p:*")) == len(stored) + 1 - 4
    counts = run.state()["groups"]
    own_service.kill()
    own_service.start()
    after = connect(own_service.url, "r").state()["groups"]
    assert after == counts
    assert (after["stored"], after["rejected"]) == (len(stored) + 1, {"version_above_published": 1})


# ---------------------------------------------------------------------- no writes


def test_the_service_waits_while_redis_is_a_replica(
    tmp_path: Path, serve: Callable[..., ServeProcess], connect: Connect
) -> None:
    """READONLY: 503 with the server's message, also on `/readyz`; the service continues after the fault."""
    with Valkey(tmp_path / "v") as server:
        service = serve("--redis-url", server.url)
        run = connect(service.url, "r")
        run.put(batch={"groups_per_batch": 1})
        server.client.replicaof("127.0.0.1", "1")
        refused = run.post("groups", **group("a"))
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:replaybuf:problem:unavailable")
        assert "replica" in refused.json()["detail"]
        waiting = eventually(lambda: ready(service)["waiting_for"], WITHIN_S)
        assert "takes no writes for now" in waiting
        server.client.replicaof("NO", "ONE")
        eventually(lambda: run.post("groups", **group("a")).status_code == 200, WITHIN_S)
        eventually(lambda: ready(service)["status"] == "ready", WITHIN_S)


def test_the_service_waits_while_redis_cannot_save(
    tmp_path: Path, serve: Callable[..., ServeProcess], connect: Connect
) -> None:
    """MISCONF after a failed snapshot: 503 with the server's words until it may write again."""
    with Valkey(tmp_path / "v", appendonly="no", save="3600 1") as server:
        service = serve("--redis-url", server.url)
        run = connect(service.url, "r")
        run.put(batch={"groups_per_batch": 1})
        shutil.rmtree(server.folder)  # the snapshot's folder is gone
        server.client.bgsave()
        eventually(lambda: server.client.info("persistence")["rdb_last_bgsave_status"] == "err", WITHIN_S)
        refused = run.post("groups", **group("a"))
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:replaybuf:problem:unavailable"), refused.text
        assert "MISCONF" in refused.json()["detail"]
        assert "MISCONF" in eventually(lambda: ready(service)["waiting_for"], WITHIN_S)
        server.client.config_set("stop-writes-on-bgsave-error", "no")
        eventually(lambda: run.post("groups", **group("a")).status_code == 200, WITHIN_S)


def let_files_grow_to(limit_bytes: int, *pids: int) -> None:
    """Bound the size of every file these processes write, and those they start."""
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))


def test_a_full_disk_loses_nothing_and_the_service_waits(own_service: ServeProcess, connect: Connect) -> None:
    """503 that says how the embedded Valkey ended, `/readyz` too; with room again all that was stored is there."""
    run = connect(own_service.url, "r")
    run.put(batch={"groups_per_batch": 1})
    valkey = valkey_of(own_service.data_dir)
    let_files_grow_to(200_000, valkey.pid, own_service.pid)
    stored: list[str] = []
    while (answer := run.post("groups", **group(f"g{len(stored)}", tokens=1000))).status_code == 200:
        stored.append(f"g{len(stored)}")
        assert len(stored) < 100
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    def reported() -> tuple[str, str]:
        """Try again, so that it dies again: small writes between still find room."""
        detail: str = run.post("groups", **group("more", tokens=1000)).json()["detail"]
        return detail, str(ready(own_service)["waiting_for"])

    eventually(reported, WITHIN_S, lambda texts: all("the embedded Valkey ended with" in text for text in texts))
    let_files_grow_to(resource.RLIM_INFINITY, own_service.pid)  # and with it the next Valkey
    eventually(lambda: run.post("groups", **group("more", tokens=1000)).status_code == 200, WITHIN_S)
    group_ids = {entry["group_id"] for entry in run.get("groups").json()["groups"]}
    assert group_ids >= {*stored, "more"}
    assert run.state()["groups"]["stored"] == len(group_ids)


def test_the_service_waits_while_a_killed_redis_loads_its_data(
    tmp_path: Path, serve: Callable[..., ServeProcess], connect: Connect
) -> None:
    """LOADING for a while after kill -9: 503, nothing lost, and the service goes on by itself."""
    with Valkey(tmp_path / "v") as server:
        service = serve("--redis-url", server.url)
        run = connect(service.url, "r")
        run.put(batch={"groups_per_batch": 1})
        run.append(*(group(f"g{number}") for number in range(50)))
        server.client.bgrewriteaof()
        eventually(lambda: not server.client.info("persistence")["aof_rewrite_in_progress"], WITHIN_S)
        server.kill()
        # 50 ms per key, and answering in between.
        server.config |= {"key-load-delay": "50000", "loading-process-events-interval-bytes": "1024"}
        starting = threading.Thread(target=server.start)
        starting.start()
        refused = eventually(
            lambda: run.post("groups", **group("a")),
            WITHIN_S,
            lambda answer: "loading" in answer.json().get("detail", ""),
        )
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:replaybuf:problem:unavailable")
        starting.join()
        eventually(lambda: run.post("groups", **group("a")).status_code == 200, WITHIN_S)
        assert run.state()["groups"]["stored"] == 51
