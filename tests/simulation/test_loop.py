"""The simulated loop: time passes at once, a killed process does nothing more, a stopped one goes on later."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Iterator

import pytest

from tests.simulation.loop import Node, SimulatedLoop, Stuck
from tests.simulation.plan import Plan
from tests.simulation.world import World


@pytest.fixture
def world() -> Iterator[World]:
    made = World(Plan(1))
    yield made
    made.loop.discard()


async def tick(seen: list[float], world: World) -> None:
    """Note the time once a second, and at the end."""
    try:
        for _ in range(5):
            await asyncio.sleep(1.0)
            seen.append(world.now_s())
    finally:
        seen.append(-1.0)


def test_nothing_of_a_killed_process_runs_on(world: World) -> None:
    """Not even a `finally`: after kill -9 nobody releases a lease."""
    seen: list[float] = []
    node = Node("server")
    world.on(node, world.loop.create_task, tick(seen, world))
    world.loop.call_later(2.5, setattr, node, "dead", True)
    world.loop.run_until_complete(asyncio.sleep(60.0))
    assert seen == [1.0, 2.0]
    assert world.now_s() == 60.0


def test_a_stopped_process_goes_on_with_what_came_due(world: World) -> None:
    """As after SIGSTOP and SIGCONT: its timers are late, and its clock shows it."""
    seen: list[float] = []
    node = Node("server")
    world.on(node, world.loop.create_task, tick(seen, world))
    world.loop.call_later(1.5, setattr, node, "stopped", True)
    world.loop.call_later(9.0, world.loop.go_on, node)
    world.loop.run_until_complete(asyncio.sleep(60.0))
    assert seen == [1.0, 9.0, 10.0, 11.0, 12.0, -1.0]


def test_each_process_has_a_wall_clock(world: World) -> None:
    """The monotonic clock of a process never jumps."""
    node = Node("server")
    node.wall_ahead_s = 3600.0
    with world.instead_of_python():
        assert world.on(node, time.time) == time.time() + 3600.0
        assert world.on(node, time.monotonic) == time.monotonic()


def test_real_time_and_the_real_network_are_refused_by_name(world: World) -> None:
    """Work that left the simulation would make schedules slow, and different each time."""
    with world.instead_of_python():
        with pytest.raises(RuntimeError, match="create_connection"):
            world.loop.run_until_complete(world.loop.create_connection(asyncio.Protocol, "127.0.0.1", 1))
        with pytest.raises(RuntimeError, match=r"socket\.create_connection"):
            socket.create_connection(("127.0.0.1", 1))
        world.loop._fatal = None
        with pytest.raises(RuntimeError, match=r"time\.sleep"):
            world.loop.run_until_complete(sleeping())


async def sleeping() -> None:
    """Sleep in real time, and hide the error of it."""
    with contextlib.suppress(RuntimeError):
        time.sleep(0.1)  # noqa: ASYNC251 - as faulty code would
    await asyncio.sleep(1.0)


def test_work_that_waits_for_nothing_is_stuck() -> None:
    """A deadlock ends the schedule at once, and not after a timeout in real time."""
    loop = SimulatedLoop(random.Random(1))
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())
    loop.discard()
