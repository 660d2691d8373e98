"""Requests come in by a pipe, run side by side in one event loop, and their answers go out by another."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import msgspec

from .faults import Rewritten, Unfit, told
from .messages import (
    LENGTH,
    Answer,
    BeginPlay,
    Cancel,
    Describe,
    Described,
    Dropped,
    DropPlay,
    EndPlay,
    Failed,
    OfTaskset,
    ReadTasks,
    Ready,
    Rendering,
    Requests,
    Scored,
    ScoreReply,
    Standing,
    TakeTurn,
    TaskRow,
    TaskRows,
    Work,
    framed,
)

EXIT_S = 2.0
"""What a taskset does at exit may take so long."""


class Play(Protocol):
    """One rollout of a task; `replaybuf_taskset_worker.plays.Play` is one."""

    async def standing(self) -> list[int] | Scored:
        """Wait until it asks for a turn, and return what stands before that; or its scores, once it has ended.

        Raises `Rewritten`, `PlayFailed`.
        """

    def take(self, token_ids: list[int], *, cut_off: bool) -> None:
        """Give it the turn it asked for."""

    def end(self) -> None:
        """Give it no more turns."""

    def drop(self) -> None:
        """Cancel it."""


class Taskset(Protocol):
    """What the process answers for; `LoadedTaskset` is one."""

    def describe(self, number: int) -> Described:
        """Say what it is."""

    async def rows(self, first: int, count: int, rendering: Rendering | None) -> list[TaskRow]:
        """Return rows by place."""

    async def score(self, data: dict[str, Any], reply: str, number: int) -> Scored:
        """Score a reply to the task with these data."""

    async def begin(self, data: dict[str, Any], rendering: Rendering, prompt_ids: list[int]) -> Play:
        """Begin a play of the task with these data, whose first turn follows `prompt_ids`."""


Load: TypeAlias = Callable[[str, dict[str, Any]], Taskset]


class Worker:
    """Does many requests at the same time, in one event loop: most rewards wait for others, or are quick."""

    def __init__(self, load: Load, send: Callable[[Answer], None]) -> None:
        self._load = load
        self._send = send
        self._tasksets: dict[str, Taskset] = {}
        self._plays: dict[str, Play] = {}
        self._running: dict[int, asyncio.Task[Answer]] = {}

    def take(self, request: Requests) -> None:
        """Start a request, or cancel one."""
        if isinstance(request, Cancel):
            if request.number in self._running:
                self._running[request.number].cancel()
            return
        task = asyncio.get_running_loop().create_task(self._tried(request))
        self._running[request.number] = task
        task.add_done_callback(lambda done: self._answer(request.number, done))

    def _answer(self, number: int, done: asyncio.Task[Answer]) -> None:
        del self._running[number]
        cancelled = Failed(number=number, reason="cancelled", detail="it was cancelled")
        self._send(cancelled if done.cancelled() else done.result())

    async def _tried(self, request: Work) -> Answer:
        try:
            return await self._done(request)
        except Unfit as error:
            return Failed(number=request.number, reason="invalid", detail=str(error))
        except Rewritten as error:
            return Failed(number=request.number, reason="rewritten", detail=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a taskset raises is its author's to read
            whose = repr(request.taskset) if isinstance(request, OfTaskset) else "a play"
            return Failed(number=request.number, reason="raised", detail=f"{whose} raised {told(error)}")

    async def _done(self, request: Work) -> Answer:
        number = request.number
        match request:
            case Describe():
                return self._taskset(request).describe(number)
            case ReadTasks():
                rows = await self._taskset(request).rows(request.first, request.count, request.rendering)
                return TaskRows(number=number, rows=rows)
            case ScoreReply():
                return await self._taskset(request).score(request.task, request.reply, number)
            case BeginPlay():
                return await self._begun(request)
            case TakeTurn():
                play = self._play(request.play)
                play.take(request.token_ids, cut_off=request.cut_off)
                return await _standing(play, number)
            case EndPlay():
                play = self._play(request.play)
                play.end()
                return await _standing(play, number)
            case DropPlay():
                if request.play in self._plays:
                    self._plays.pop(request.play).drop()
                return Dropped(number=number)

    async def _begun(self, request: BeginPlay) -> Standing:
        play = await self._taskset(request).begin(request.task, request.rendering, request.prompt_ids)
        self._plays[request.play] = play
        return await _standing(play, request.number)

    def _play(self, name: str) -> Play:
        if name not in self._plays:
            raise Unfit("its play is not here any more; the process was started anew")
        return self._plays[name]

    def _taskset(self, request: OfTaskset) -> Taskset:
        key = json.dumps([request.taskset, request.options], sort_keys=True)
        if key not in self._tasksets:
            self._tasksets[key] = self._load(request.taskset, request.options)
        return self._tasksets[key]


async def _standing(play: Play, number: int) -> Standing:
    stood = await play.standing()
    if isinstance(stood, Scored):
        return Standing(number=number, scored=stood)
    return Standing(number=number, answer=stood)


def main() -> None:
    """Answer for the tasksets of verifiers."""
    from .loaded import LoadedTaskset
    from .plays import TurnServer

    turns = TurnServer()
    run(_version, lambda name, options: LoadedTaskset(name, options, turns))


def run(version: Callable[[], str], load: Load) -> None:
    """Answer request after request until standard input ends. `version` raises `ImportError` where there is none."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # Last, not first as for a script: a folder called `datasets` there must not hide the library of that name.
    sys.path.append(str(Path.cwd()))
    # Tool servers of a taskset are processes that import its module.
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())])

    def send(answer: Answer) -> None:
        answers.write(framed(answer))
        answers.flush()

    try:
        send(Ready(version=version()))
    except ImportError as error:
        send(Failed(number=0, reason="missing", detail=told(error)))
        return
    asyncio.run(_serve(requests, Worker(load, send)))


def _version() -> str:
    import verifiers
    import verifiers.v1  # older ones have none

    return str(verifiers.__version__)


async def _serve(requests: BinaryIO, worker: Worker) -> None:
    threading.Thread(target=_read, args=(requests, asyncio.get_running_loop(), worker), daemon=True).start()
    await asyncio.Event().wait()  # until the reading thread ends the process


def _read(requests: BinaryIO, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
    while head := requests.read(LENGTH.size):
        (length,) = LENGTH.unpack(head)
        request = msgspec.msgpack.decode(requests.read(length), type=Requests)
        loop.call_soon_threadsafe(worker.take, request)
    # The generator is gone: nobody waits for what is being scored. What verifiers started it ends at exit, and this is
    # the exit for it, since the main thread may be in the middle of anything.
    late = threading.Timer(EXIT_S, os._exit, [0])
    late.daemon = True
    late.start()
    atexit._run_exitfuncs()
    os._exit(0)
