"""The main loop of the process: requests come in, run side by side in one event loop, and answers go out."""

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

from .messages import (
    Answer,
    BeginPlay,
    Cancel,
    Describe,
    Described,
    Dropped,
    DropPlay,
    EndPlay,
    Failed,
    PlayState,
    ReadTasks,
    Ready,
    Rendering,
    Request,
    Rewritten,
    Scored,
    ScoreReply,
    TakeTurn,
    TaskRow,
    TaskRows,
    TasksetRequest,
    Unfit,
    Work,
    described,
)
from .pipes import claim_pipes, received
from .plays import Play

EXIT_S = 2.0
"""Time limit for exit functions."""


class Taskset(Protocol):
    """One taskset; `LoadedTaskset` documents the methods."""

    def describe(self, number: int) -> Described:
        """Describe its tasks."""

    async def rows(self, first: int, count: int, rendering: Rendering | None) -> list[TaskRow]:
        """Return rows by place."""

    async def score(self, data: dict[str, Any], reply: str, number: int) -> Scored:
        """Score a reply."""

    async def begin(self, data: dict[str, Any], rendering: Rendering, prompt_ids: list[int]) -> Play:
        """Begin a play."""


Load: TypeAlias = Callable[[str, dict[str, Any]], Taskset]


class Worker:
    """Runs many requests at the same time in one event loop: most rewards wait for others, or are quick."""

    def __init__(self, load: Load, send: Callable[[Answer], None]) -> None:
        self._load = load
        self._send = send
        self._tasksets: dict[str, Taskset] = {}
        self._plays: dict[str, Play] = {}
        self._running: dict[int, asyncio.Task[Answer]] = {}

    def take(self, request: Request) -> None:
        """Start a request, or cancel one."""
        if isinstance(request, Cancel):
            if request.number in self._running:
                self._running[request.number].cancel()
            return
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._running[request.number] = task
        task.add_done_callback(lambda done: self._finish(request.number, done))

    def _finish(self, number: int, done: asyncio.Task[Answer]) -> None:
        del self._running[number]
        cancelled = Failed(number=number, reason="cancelled", detail="the request was cancelled")
        self._send(cancelled if done.cancelled() else done.result())

    async def _answer(self, request: Work) -> Answer:
        try:
            return await self._run(request)
        except Unfit as error:
            return Failed(number=request.number, reason="invalid", detail=str(error))
        except Rewritten as error:
            return Failed(number=request.number, reason="rewritten", detail=str(error))
        except Exception as error:  # noqa: BLE001 - a taskset may raise anything
            whose = repr(request.taskset) if isinstance(request, TasksetRequest) else "a play"
            return Failed(number=request.number, reason="raised", detail=f"{whose} raised {described(error)}")

    async def _run(self, request: Work) -> Answer:
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
                play = await self._taskset(request).begin(request.task, request.rendering, request.prompt_ids)
                self._plays[request.play] = play
            case TakeTurn():
                play = self._play(request.play)
                play.take(request.token_ids, cut_off=request.cut_off)
            case EndPlay():
                play = self._play(request.play)
                play.end()
            case DropPlay():
                if request.play in self._plays:
                    self._plays.pop(request.play).drop()
                return Dropped(number=number)
        state = await play.state()
        if isinstance(state, Scored):
            return PlayState(number=number, scored=state)
        return PlayState(number=number, answer=state)

    def _play(self, name: str) -> Play:
        if name not in self._plays:
            raise Unfit("its play is lost: the process was restarted")
        return self._plays[name]

    def _taskset(self, request: TasksetRequest) -> Taskset:
        key = json.dumps([request.taskset, request.options], sort_keys=True)
        if key not in self._tasksets:
            self._tasksets[key] = self._load(request.taskset, request.options)
        return self._tasksets[key]


def main() -> None:
    """Answer requests to the tasksets of verifiers."""
    from .loaded import LoadedTaskset
    from .plays import TurnServer

    turns = TurnServer()
    run(_version, lambda name, options: LoadedTaskset(name, options, turns))


def run(version: Callable[[], str], load: Load) -> None:
    """Answer requests until standard input ends. `version` raises `ImportError` without verifiers."""
    requests, send = claim_pipes()
    # Last, not first as for a script: a folder called `datasets` there must not hide the library of that name.
    sys.path.append(str(Path.cwd()))
    # Tool servers of a taskset are processes that import its module.
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())])
    try:
        send(Ready(version=version()))
    except ImportError as error:
        send(Failed(number=0, reason="missing", detail=described(error)))
        return
    asyncio.run(_serve(requests, Worker(load, send)))


def _version() -> str:
    import verifiers
    import verifiers.v1  # older versions do not have it

    return str(verifiers.__version__)


async def _serve(requests: BinaryIO, worker: Worker) -> None:
    threading.Thread(target=_read, args=(requests, asyncio.get_running_loop(), worker), daemon=True).start()
    await asyncio.Event().wait()  # the reading thread ends the process


def _read(requests: BinaryIO, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
    for request in received(requests, Request):
        loop.call_soon_threadsafe(worker.take, request)
    # The generator is gone. Exit functions end what verifiers started. They run here, because the main thread may be
    # in the middle of anything.
    late = threading.Timer(EXIT_S, os._exit, [0])
    late.daemon = True
    late.start()
    atexit._run_exitfuncs()
    os._exit(0)
