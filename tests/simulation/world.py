"""The world of one schedule: loop, randomness, clocks, faults, and the trace of what happened."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar
from unittest import mock

from replaybuf.plugins import time_limit
from tests.simulation.coverage import Coverage
from tests.simulation.faults import Faults
from tests.simulation.loop import NODE, WORLD, Node, SimulatedLoop
from tests.simulation.mix import REDIS, Mix
from tests.simulation.plan import Plan

T = TypeVar("T")

RUN = "run"
EPOCH_S = 1_800_000_000.0
"""Wall clock at the start of each schedule."""
SHORTEST_WAY_S, LONGEST_WAY_S = 0.0001, 0.002
LATEST_S, LATEST_SEND_S = 4.0, 2.0


class World:
    """Everything that a schedule takes from outside comes from here, and from `seed` alone."""

    def __init__(self, plan: Plan) -> None:
        self.seed = plan.seed
        self.rng = random.Random(f"schedule {plan.seed}")
        self._random = self.rng.random
        # By a generator of its own: other kinds do not change the schedules of this one.
        self.redis = plan.redis or random.Random(f"redis {plan.seed}").choice(REDIS)
        self.faults = Faults.draw(self.rng, plan.only, self.redis)
        self.mix = Mix.draw(plan.seed, self.rng, self.redis)
        self.faults_s = self.mix.faults_s if plan.faults_s is None else plan.faults_s
        self.coverage = Coverage()
        self.loop = SimulatedLoop(self.rng)
        self.network: dict[tuple[str, int], Any] = {}
        """Servers that listen, by address."""
        self.now_s = self.loop.time
        """Returns the true time since the start."""
        self._trace: list[tuple[float, Node, tuple[Any, ...]]] = []
        self.folder = "/folder"
        """Folder of all files of the schedule: its name is random, so the trace has another one."""
        self.wrong: list[str] = []
        """What the world itself has seen go wrong."""
        self._kept_running: list[Callable[[], Node]] = []

    # ------------------------------------------------------------------ time

    def wall_s(self) -> float:
        """Return the wall clock of the running node."""
        return EPOCH_S + self.loop.time() + NODE.get().wall_ahead_s

    def way_s(self) -> float:
        """Draw how long a message takes."""
        return SHORTEST_WAY_S + (LONGEST_WAY_S - SHORTEST_WAY_S) * self._random()

    def at(self, node: Node, when_s: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function on a node at a time."""
        self.loop.call_at(when_s, call, *arguments, context=node.context)

    def on(self, node: Node, call: Callable[..., T], *arguments: Any) -> T:
        """Call a function now, as work of a node."""
        context = contextvars.copy_context()
        context.run(NODE.set, node)
        return context.run(call, *arguments)

    # ------------------------------------------------------------------ trace

    def note(self, *what: Any, node: Node | None = None) -> None:
        """Record what happened, and where. `what`: a text, or a function and its arguments, for nobody may read it."""
        self._trace.append((self.loop.time(), node or NODE.get(), what))

    def trace(self) -> list[str]:
        """Return a line for all that was noted."""
        lines = (
            f"{at_s:10.6f} {node} {what[0] if len(what) == 1 else what[0](*what[1:])}"
            for at_s, node, what in self._trace
        )
        return [line.replace(self.folder, "/folder") for line in lines]

    # ------------------------------------------------------------------ Python

    @contextlib.contextmanager
    def running(self, node: Callable[[], Node]) -> Iterator[None]:
        """Keep a process from harm meanwhile: it may alone know what Redis lacks, and others wait seconds for it."""
        self._kept_running.append(node)
        try:
            yield
        finally:
            self._kept_running.remove(node)

    def may_hurt(self, node: Node) -> bool:
        """Return whether a process may be stopped, or be kept from its servers, now."""
        return all(kept() is not node for kept in self._kept_running)

    @contextlib.contextmanager
    def instead_of_python(self) -> Iterator[None]:
        """Replace the clocks, the random sources and the network of this process during the body."""
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (time, "time", self.wall_s),
            (time, "time_ns", lambda: int(1e9 * self.wall_s())),
            (time, "monotonic", self.now_s),
            (time, "perf_counter", self.now_s),
            (time, "sleep", self._refuse("time.sleep")),
            (os, "getpid", lambda: 1),
            (socket, "gethostname", lambda: "host"),
            (secrets, "token_hex", lambda size: self.rng.randbytes(size).hex()),
            (socket, "create_connection", self._refuse("socket.create_connection")),
            (socket.socket, "connect", self._refuse("socket.connect")),
            (time_limit, "_timer", contextlib.nullcontext),  # of real time: a busy machine would change the schedule
            (_tasks_of_asyncio(), "add", _nowhere),  # the loop knows its tasks
        ]
        with contextlib.ExitStack() as stack:
            state = random.getstate()
            stack.callback(random.setstate, state)
            random.seed(self.seed)
            token = NODE.set(WORLD)
            stack.callback(NODE.reset, token)
            for owner, name, double in replaced:
                stack.enter_context(mock.patch.object(owner, name, double))
            yield

    def _refuse(self, name: str) -> Callable[..., NoReturn]:
        def refuse(*arguments: Any, **options: Any) -> NoReturn:
            error = RuntimeError(f"{name} would leave the simulation: use the event loop")
            self.loop.end_with(error)  # who called it may catch the error
            raise error

        return refuse


def _tasks_of_asyncio() -> Any:
    """Return the weak set of all tasks."""
    names = vars(asyncio.tasks)
    return names["_scheduled_tasks" if "_scheduled_tasks" in names else "_all_tasks"]  # renamed in Python 3.12


def _nowhere(task: object) -> None:
    """Keep no task."""
