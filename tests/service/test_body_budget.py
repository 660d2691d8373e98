"""The budget of request bodies in memory: who gets room, who waits, who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.errors import ServiceUnavailable, TooLarge
from replaybuf.service.http.body.body_budget import SMALL_BYTES, BodyBudget
from replaybuf.service.traffic import Traffic
from tests.conftest import JSON, ServeProcess, Starter, group
from tests.waiting import eventually

MIB = 1 << 20


def run(main: Any) -> None:
    """Run a coroutine; one that hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(30):
            await main

    asyncio.run(limited())


def test_bodies_share_the_budget_first_come_first_served() -> None:
    """A small body behind a large one waits too: else the large one would never get room."""

    async def main() -> None:
        traffic, order = Traffic(), list[int]()
        budget = BodyBudget(10 * MIB, traffic, timeout_s=20)

        async def read(total_bytes: int) -> None:
            with budget.share() as share:
                await share.hold(total_bytes)
                order.append(total_bytes)

        with budget.share() as first:
            await first.hold(6 * MIB)
            others = [asyncio.create_task(read(size)) for size in (8 * MIB, 2 * MIB)]
            await asyncio.sleep(0)
            assert traffic.body_bytes == 6 * MIB - SMALL_BYTES
        await asyncio.gather(*others)
        assert order == [8 * MIB, 2 * MIB]
        assert traffic.body_bytes == 0

    run(main())


def test_a_body_without_room_in_time_is_refused_and_frees_what_it_holds() -> None:
    """It is answered 503 with Retry-After; the body that waited behind it goes on at once."""

    async def main() -> None:
        traffic = Traffic()
        budget = BodyBudget(10 * MIB, traffic, timeout_s=0.01)
        with budget.share() as first:
            await first.hold(6 * MIB)
            no_room = r"no room .*the maximum is 10485760"
            with pytest.raises(ServiceUnavailable, match=no_room) as refused, budget.share() as second:
                await second.hold(2 * MIB)
                await second.hold(9 * MIB)
            assert refused.value.retry_after_s
            with budget.share() as third:
                await first.hold(10 * MIB)  # it waited first: it may take all that is left
                await third.hold(SMALL_BYTES)
        assert traffic.refused == {"no_body_room": 1}
        assert traffic.body_bytes == 0

    run(main())


def test_a_cancelled_body_leaves_the_queue() -> None:
    """Cancelled while it waits, and in the turn of the loop in which it is granted its room."""

    async def main() -> None:
        traffic = Traffic()
        budget = BodyBudget(MIB, traffic, timeout_s=20)
        for granted_too in (False, True):
            with budget.share() as first, budget.share() as second:
                await first.hold(MIB)
                waiting = asyncio.create_task(second.hold(MIB))
                await asyncio.sleep(0)
                if granted_too:
                    first.__exit__()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                if granted_too:
                    first.held_bytes = SMALL_BYTES  # it has ended
        assert traffic.body_bytes == 0

    run(main())


def test_small_bodies_need_no_room_and_a_body_above_the_budget_is_too_large() -> None:
    async def main() -> None:
        budget = BodyBudget(MIB, Traffic(), timeout_s=0.01)
        with budget.share() as all_of_it, budget.share() as small, budget.share() as huge:
            await all_of_it.hold(MIB + SMALL_BYTES)
            await small.hold(SMALL_BYTES)
            with pytest.raises(TooLarge, match="--body-budget-bytes") as refused:
                await huge.hold(MIB + 2 * SMALL_BYTES)
            assert refused.value.bound == MIB

    run(main())


def test_bodies_that_are_half_read_never_wait_for_each_other_for_ever() -> None:
    """Each of four needs more than half of the room: they end one after another, in the order in which they waited."""

    async def main() -> None:
        traffic, order = Traffic(), list[int]()
        budget = BodyBudget(10 * MIB, traffic, timeout_s=20)

        async def read(number: int) -> None:
            with budget.share("address", "run") as share:
                for size in range(MIB, 8 * MIB, MIB):
                    await share.hold(size)
                    await asyncio.sleep(0)
                order.append(number)

        await asyncio.gather(*(read(number) for number in range(4)))
        assert sorted(order) == [0, 1, 2, 3] and traffic.body_bytes == 0

    run(main())


def test_one_address_and_one_run_have_at_most_half_of_the_room() -> None:
    """What is left is for others, also while a body of that address waits."""

    async def main() -> None:
        traffic = Traffic()
        budget = BodyBudget(16 * MIB, traffic, timeout_s=0.01)
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                await stack.enter_context(budget.share("attacker", "a")).hold(MIB)
            await stack.enter_context(budget.share("attacker", "b")).hold(MIB)  # it is favoured now
            for holders in (("attacker", "c"), ("other", "a")):
                with pytest.raises(ServiceUnavailable), budget.share(*holders) as share:
                    await share.hold(2 * MIB)
            await stack.enter_context(budget.share("other", "c")).hold(2 * MIB)

    run(main())


def test_slow_bodies_that_declare_much_leave_room_for_others(tmp_path: Path, started: Starter) -> None:
    """40 of them declare twice the budget together; another run stores a group of 200 kB at once."""
    server = started(ServeProcess(tmp_path / "data", "--body-budget-bytes", str(256 * MIB)))
    host, port = server.url.removeprefix("http://").split(":")
    with httpx.Client(base_url=server.url, timeout=20) as http, contextlib.ExitStack() as slow:
        for name in ("a", "b"):
            http.put(f"/v1/runs/{name}", json={"batch": {"groups_per_batch": 1}})
        for _ in range(40):
            half = slow.enter_context(socket.create_connection((host, int(port))))
            half.sendall(
                b"POST /v1/runs/a/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: 60000000\r\n\r\n{"
            )
        eventually(lambda: held_bytes(http) >= 40 * (MIB - SMALL_BYTES), 20)
        assert held_bytes(http) <= 41 * MIB
        large = {"groups": [group("a", metadata={"x": "y" * 200_000})]}
        assert http.post("/v1/runs/b/groups", json=large).status_code == 200


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service with room for one body of 600 kB."""
    server = ServeProcess(tmp_path_factory.mktemp("tight") / "data", "--body-budget-bytes", "1000000").start()
    yield server
    server.end()


def held_bytes(http: httpx.Client) -> float:
    """Read the metric."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return next(family.samples[0].value for family in families if family.name == "replaybuf_body_bytes")


def test_a_body_waits_until_another_one_is_done(tight: ServeProcess) -> None:
    """A half body holds its declared size; what waits is stored as soon as it is gone, and small calls go on."""
    append = {"groups": [group(name, metadata={"x": "y" * 200_000}) for name in "abc"]}
    with httpx.Client(base_url=tight.url, timeout=20) as http:
        http.put("/v1/runs/r", json={"batch": {"groups_per_batch": 1}})
        host, port = tight.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half:
            half.sendall(
                b"POST /v1/runs/r/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: 600000\r\n\r\n{"
            )
            while held_bytes(http) == 0:
                pass
            with socket.create_connection((host, int(port))) as waiting:
                body = msgspec.json.encode(append)
                head = f"POST /v1/runs/r/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
                waiting.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
                assert http.post("/v1/runs/r/tickets", json={"producer": "p", "count": 1}).status_code == 200
                half.close()
                assert waiting.recv(100).startswith(b"HTTP/1.1 200 ")
        while held_bytes(http):
            pass


def test_a_body_above_the_budget_is_refused_with_the_option(tight: ServeProcess, tmp_path: Path) -> None:
    with httpx.Client(base_url=tight.url) as http:
        refused = http.post("/v1/runs/r/groups", content=b" " * 1_100_000, headers=JSON)
    assert (refused.status_code, refused.json()["bound"]) == (413, 1_000_000)
