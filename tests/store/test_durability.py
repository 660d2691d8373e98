"""Durability of acknowledged writes: assessed from settings, and proven on real servers."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from replaybuf.errors import Invalid, NoRoom, NotDurable, ServiceUnavailable
from replaybuf.store import Store, WritePolicy
from replaybuf.store.known_ends import NO_ENDS
from replaybuf.store.redis.connection import Connection
from replaybuf.store.redis.durability import LONGEST_WAIT_S, Barrier, ServerSettings, assess
from replaybuf.wire.ledger import AckRecord
from tests.store.test_store import to_append
from tests.valkeys import Valkey

STRICT, RELAXED = WritePolicy(), WritePolicy("relaxed")


def settings(
    appendonly: bool | None = True,
    appendfsync: str | None = "always",
    *,
    policy: str | None = "noeviction",
    rewrite: bool | None = False,
    waitaof: bool = True,
    replicas: int = 0,
    replica: bool = False,
    refused: str | None = None,
) -> ServerSettings:
    """Describe a server; the default is strict."""
    return ServerSettings(appendonly, appendfsync, rewrite, policy, waitaof, replicas, replica, refused)


UNKNOWN = settings(True, None, rewrite=None, refused="ERR unknown command")


@pytest.mark.parametrize(
    ("server", "wanted", "level", "met_by", "waits"),
    [
        (settings(), STRICT, "strict", "appendfsync always", "WAITAOF 1 0"),
        (settings(), RELAXED, "strict", "appendfsync always", None),
        (settings(waitaof=False), STRICT, "strict", "appendfsync always", None),
        (settings(True, "everysec"), STRICT, "strict", "WAITAOF 1 0", "WAITAOF 1 0"),
        (settings(True, "everysec"), RELAXED, "relaxed", "appendfsync everysec", None),
        (settings(True, "everysec", waitaof=False), STRICT, "relaxed", "appendfsync everysec", None),
        (settings(True, "no"), STRICT, "relaxed", "appendfsync no", None),
        (settings(False), STRICT, "relaxed", "appendonly no", None),
        (settings(rewrite=True), STRICT, "strict", "WAITAOF 1 0", "WAITAOF 1 0"),
        (settings(rewrite=True, waitaof=False), STRICT, "relaxed", "appendfsync always", None),
        (settings(policy="allkeys-lru"), STRICT, "relaxed", "appendfsync always", "WAITAOF 1 0"),
        (settings(policy=None), STRICT, "relaxed", "appendfsync always", "WAITAOF 1 0"),
        (UNKNOWN, STRICT, "strict", "WAITAOF 1 0", "WAITAOF 1 0"),
        (UNKNOWN, RELAXED, "relaxed", "unknown", None),
        (settings(replica=True), STRICT, "relaxed", "WAITAOF 1 0", "WAITAOF 1 0"),
        (
            settings(replicas=2),
            WritePolicy(replicas=2),
            "strict",
            "appendfsync always and WAIT 2",
            "WAITAOF 1 0 and WAIT 2",
        ),
        (settings(False, replicas=1), WritePolicy(replicas=1), "relaxed", "WAIT 1", "WAIT 1"),
        (
            settings(waitaof=False, replicas=1),
            WritePolicy(replicas=1),
            "strict",
            "appendfsync always and WAIT 1",
            "WAIT 1",
        ),
        (settings(replicas=1), WritePolicy("relaxed", 1), "strict", "appendfsync always and WAIT 1", "WAIT 1"),
    ],
)
def test_the_level_follows_from_settings_and_wait(
    server: ServerSettings, wanted: WritePolicy, level: str, met_by: str, waits: str | None
) -> None:
    """Settings alone are strict only with appendfsync always."""
    durability = assess(server, wanted)
    assert (durability.level, durability.met_by) == (level, met_by)
    assert (durability.barrier.text if durability.barrier else None) == waits


@pytest.mark.parametrize("appendonly", [True, False, None])
@pytest.mark.parametrize("appendfsync", ["always", "everysec", "no", None])
@pytest.mark.parametrize("waitaof", [True, False])
def test_strict_always_means_the_disk(appendonly: bool | None, appendfsync: str | None, waitaof: bool) -> None:
    """For all settings: strict means appendfsync always or a wait for the disk; relaxed has a reason."""
    for rewrite, policy, wanted, refused in itertools.product(
        (True, False, None), ("noeviction", "volatile-lru", None), (STRICT, RELAXED), (None, "no")
    ):
        server = settings(appendonly, appendfsync, policy=policy, rewrite=rewrite, waitaof=waitaof, refused=refused)
        durability = assess(server, wanted)
        waits = durability.barrier is not None and durability.barrier.local
        always = appendonly is True and appendfsync == "always" and not rewrite
        if durability.level == "strict":
            assert (waits or always) and policy == "noeviction" and not durability.reasons
        elif appendonly is not None and (appendfsync or refused):
            assert durability.reasons


def test_missing_replicas_are_reported_and_the_level_stays_strict() -> None:
    """No write is confirmed without them, so no confirmed write is at risk."""
    durability = assess(settings(replicas=0), WritePolicy(replicas=1))
    assert durability.level == "strict"
    assert "0 replicas connected; wait_replicas is 1" in durability.reasons[0]


@pytest.mark.parametrize(("replicas", "timeout_s"), [(-1, 1.0), (0, 0.0), (0, LONGEST_WAIT_S + 1), (0, float("nan"))])
def test_waits_out_of_bounds_are_rejected(replicas: int, timeout_s: float) -> None:
    """The error names option, value and bound."""
    with pytest.raises(Invalid, match=r"wait_\w+ is -?[\w.]+;"):
        WritePolicy("strict", replicas, timeout_s)


def test_an_unmet_wait_names_reached_and_needed_confirmations() -> None:
    """In the message and in the machine fields; a refused wait is unconfirmed too."""
    barrier = Barrier(local=True, replicas=2, timeout_s=0.5)
    assert barrier.check([[1, 0], 2]) == 2
    for local, replicas in ((0, 2), (1, 1)):
        with pytest.raises(NotDurable) as caught:
            barrier.check([[local, 0], replicas])
        assert caught.value.value == {"local": local, "replicas": replicas}
        assert caught.value.bound == {"local": 1, "replicas": 2, "timeout_s": 0.5}
    with pytest.raises(NotDurable, match="refused WAITAOF 1 0 and WAIT 2"):
        barrier.check([ValueError("appendonly is disabled"), 2])


# ---------------------------------------------------------------------- on real servers


@pytest.fixture
def everysec(tmp_path: Path) -> Iterator[Valkey]:
    """Start a server that syncs once a second."""
    with Valkey(tmp_path / "v", appendfsync="everysec") as server:
        yield server


def on(server: Valkey, work: Callable[[Store], Awaitable[None]], wanted: WritePolicy = STRICT) -> None:
    """Run `work` on a new store."""

    async def main() -> None:
        store = await Store.open(server.url, wanted)
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(main())


def test_kills_of_an_everysec_server_with_waitaof_lose_no_acknowledged_write(everysec: Valkey) -> None:
    """Five kills, each right after one of four appenders was answered."""
    acknowledged: list[str] = []
    names = map("g{}".format, itertools.count())

    async def until_killed(store: Store) -> None:
        answered = asyncio.Event()
        enough = len(acknowledged) + 6

        async def produce() -> None:
            for name in names:
                try:
                    await store.groups.append("r", [to_append(name)], {"": 0}, time.time())
                except ServiceUnavailable:
                    return
                acknowledged.append(name)
                if len(acknowledged) >= enough:
                    answered.set()

        async def killer() -> None:
            await asyncio.wait_for(answered.wait(), 20)
            everysec.kill()

        await asyncio.gather(*(produce() for _ in range(4)), killer())

    async def all_there(store: Store) -> None:
        numbers = await store.groups.find_numbers("r", acknowledged)
        assert [name for name, number in zip(acknowledged, numbers, strict=True) if number is None] == []
        entries = await store.groups.read_entries("r", [int(number or 0) for number in numbers])
        frames = await store.groups.read_frames("r", {entry.strings.payload_key: 1000 for entry in entries})
        assert len(frames) == len(acknowledged) and None not in frames

    for _ in range(5):
        on(everysec, until_killed)
        everysec.start()
        on(everysec, all_there)
    assert len(acknowledged) >= 30


def test_a_write_is_confirmed_before_an_idle_server_wakes_up_by_itself(everysec: Valkey) -> None:
    """Once a second here; 60 writes one after the other would take a minute."""
    everysec.client.config_set("hz", 1)

    async def work(store: Store) -> None:
        begun_s = time.monotonic()
        for number in range(60):
            await store.groups.append("r", [to_append(f"g{number}")], {"": 0}, time.time())
        assert time.monotonic() - begun_s < 30

    on(everysec, work)


def test_a_read_of_what_is_confirmed_is_a_write_that_changes_nothing(everysec: Valkey) -> None:
    """The wait covers it. A deleted run, which a late server reads, gets no key; a counter would be one."""

    def held() -> dict[bytes, object]:
        return {key: everysec.client.dump(key) for key in everysec.client.scan_iter("*")}

    def written() -> int:
        return int(everysec.client.info("persistence")["aof_current_size"])

    async def work(store: Store) -> None:
        token = str((await store.runs.take_lease("r", "one", 60.0)).token)
        await store.ledger.append("r", token, 1, AckRecord(step=0, epoch=1))
        before, bytes_before = held(), written()
        ends = await store.streams.read_confirmed_end("r")
        assert ends and (ends.entry, ends.group) == (1, 0)
        assert await store.streams.read_confirmed_end("deleted") == NO_ENDS
        assert written() > bytes_before
        assert held() == before

    on(everysec, work)


def test_a_setting_changed_between_two_reports_is_not_trusted(tmp_path: Path) -> None:
    """With everysec the wait still confirms; without the append-only file no write is confirmed."""

    async def work(store: Store) -> None:
        server.client.config_set("appendfsync", "everysec")
        assert (await store.groups.append("r", [to_append("a")], {"": 0}, time.time()))[0].stored
        server.client.config_set("appendonly", "no")
        with pytest.raises(NotDurable, match="refused WAITAOF"):
            await store.groups.append("r", [to_append("b")], {"": 0}, time.time())
        assert store.connection.unconfirmed == 1
        assert (await store.connection.report()).durability == "relaxed"
        assert not (await store.groups.append("r", [to_append("b")], {"": 0}, time.time()))[0].stored

    with Valkey(tmp_path / "v") as server:
        on(server, work)


def test_the_first_write_to_a_server_waits_as_every_other(everysec: Valkey) -> None:
    """How to wait is known when the server was asked: the write that makes the connection asks it first."""

    async def main() -> None:
        store = Store(Connection(everysec.url, WritePolicy("relaxed", replicas=1, timeout_s=0.05)))
        try:
            with pytest.raises(NotDurable, match="0 of 1 replica"):
                await store.groups.append("r", [to_append("a")], {"": 0}, time.time())
        finally:
            await store.close()

    asyncio.run(main())


def test_a_repeat_of_an_unconfirmed_write_waits_for_the_first_try(tmp_path: Path) -> None:
    """Repeats write something themselves: on a connection without writes, WAIT would return at once."""

    def writes_of(store: Store, token: str) -> tuple[Callable[[], Awaitable[object]], ...]:
        return (
            lambda: store.groups.append("r", [to_append("a")], {"": 0}, time.time()),
            lambda: store.ledger.append("r", token, 1, AckRecord(step=0, epoch=1)),
            lambda: store.tickets.change("r", token, drop=["t0-0-1"], counts={"returned": 1}),
            lambda: store.streams.read_confirmed_end("r"),
        )

    async def work(patient: Store) -> None:
        token = str((await patient.runs.take_lease("r", "one", 60_000)).token)
        hasty = await Store.open(server.url, WritePolicy("relaxed", replicas=1, timeout_s=0.05))
        replica.signal(signal.SIGSTOP)
        try:
            for _ in range(2):  # the first try, and the repeat on another connection
                for write in writes_of(hasty, token):
                    with pytest.raises(NotDurable, match="0 of 1 replica"):
                        await write()
                    await hasty.connection.client.connection_pool.disconnect()
            assert hasty.connection.unconfirmed == 8
        finally:
            await hasty.close()
        replica.signal(signal.SIGCONT)
        for write in writes_of(patient, token):
            await write()
        assert (patient.connection.unconfirmed, patient.connection.replicas_confirmed) == (0, 1)
        assert (await patient.counters.read("r"))["duplicate"] == 1, "counted when it is answered"

    with Valkey(tmp_path / "primary") as server, Valkey(tmp_path / "replica") as replica:
        replica.replicate(server)
        on(server, work, WritePolicy("relaxed", replicas=1, timeout_s=LONGEST_WAIT_S))


def test_a_write_that_began_before_a_switch_of_the_primary_is_not_confirmed(everysec: Valkey) -> None:
    """The old primary and a replica that still follows it have confirmed it, and the new one may lack it."""

    async def work(store: Store) -> None:
        everysec.signal(signal.SIGSTOP)
        write = asyncio.create_task(store.groups.append("r", [to_append("a")], {"": 0}, time.time()))
        await asyncio.wait({write}, timeout=0.2)
        store.connection._topology.switches += 1
        everysec.signal(signal.SIGCONT)
        with pytest.raises(ServiceUnavailable, match="another primary since the write began"):
            await write
        assert not (await store.groups.append("r", [to_append("a")], {"": 0}, time.time()))[0].stored

    on(everysec, work)


def test_a_full_server_keeps_no_payload_of_a_rejected_group(tmp_path: Path) -> None:
    """Some groups of an append fit: each payload that is kept belongs to a stored group, and a repeat names them."""

    async def work(store: Store) -> None:
        server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] + 200_000)
        group = to_append("big")
        big = [type(group)(group.group, f"b{n}", "", b"x" * 60_000, 0) for n in range(20)]
        with pytest.raises(NoRoom):
            await store.groups.append("full", big, {"": 0}, time.time())
        stored = (await store.streams.read_end("full")).group
        assert 0 < stored < len(big)
        assert [server.client.ttl(key) for key in server.client.scan_iter("rb:p:*")] == [-1] * stored
        repeats = await store.groups.find_repeats("full", [group.names for group in big])
        assert [repeat.number if repeat else 0 for repeat in repeats][:stored] == list(range(1, stored + 1))
        assert not any(repeats[stored:])
        await store.counters.add("full", {"rejected:too_large": 2})
        server.client.config_set("maxmemory", 1)
        await store.counters.add("full", {"rejected:too_large": 1})
        await (await Store.open(server.url)).close()  # a full server that has the library is fit
        assert (await store.counters.read("full"))["rejected:too_large"] == 3

    with Valkey(tmp_path / "v", maxmemory_policy="noeviction") as server:
        on(server, work)


def test_a_server_that_refuses_config_is_assessed_by_info_and_waitaof(tmp_path: Path) -> None:
    """Many Redis services forbid CONFIG; WAITAOF still makes writes strict."""

    async def work(store: Store) -> None:
        report = await store.connection.report()
        assert (report.durability, report.met_by, report.max_memory_policy) == ("strict", "WAITAOF 1 0", "noeviction")
        store.connection.policy = RELAXED
        report = await store.connection.report()
        assert report.durability == "relaxed"
        assert "CONFIG GET is refused" in report.reasons[0]

    with Valkey(tmp_path / "v", appendfsync="everysec") as server:
        server.client.execute_command("ACL", "SETUSER", "default", "-config")  # type: ignore[no-untyped-call]
        on(server, work)
