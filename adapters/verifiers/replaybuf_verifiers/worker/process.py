"""The main loop of the process: requests come in, run side by side in one event loop, and answers go out."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from .messages import (
    Answer,
    BeginPlay,
    Cancel,
    Command,
    Describe,
    DropPlay,
    EndPlay,
    Failed,
    PlayState,
    ReadTasks,
    Ready,
    Request,
    Rewritten,
    Scored,
    ScoreReply,
    TakeTurn,
    TaskRows,
    TasksetRequest,
    Unfit,
    described,
)
from .plays import Play

if TYPE_CHECKING:
    from .loaded import LoadedTaskset

EXIT_S = 2.0
"""Time limit for exit functions."""


Load: TypeAlias = "Callable[[str, dict[str, Any]], LoadedTaskset]"
Numbered: TypeAlias = "Iterator[tuple[int, Request | Command]]"


class Worker:
    """Runs many requests at the same time in one event loop: most rewards wait for others, or are quick."""

    def __init__(self, load: Load, send: Callable[[int, Answer], None]) -> None:
        self._load = load
        self._send = send
        self._tasksets: dict[str, LoadedTaskset] = {}
        self._plays: dict[str, Play] = {}
        self._running: dict[int, asyncio.Task[Answer]] = {}

    def take(self, number: int, request: Request | Command) -> None:
        """Start a request, or carry out a command."""
        if isinstance(request, Cancel):
            if request.number in self._running:
                self._running[request.number].cancel()
            return
        if isinstance(request, DropPlay):
            if request.play in self._plays:
                self._plays.pop(request.play).drop()
            return
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._running[number] = task
        task.add_done_callback(lambda done: self._finish(number, done))

    def _finish(self, number: int, done: asyncio.Task[Answer]) -> None:
        del self._running[number]
        cancelled = Failed(reason="cancelled", detail="the request was cancelled")
        self._send(number, cancelled if done.cancelled() else done.result())

    async def _answer(self, request: Request) -> Answer:
        try:
            return await self._run(request)
        except Unfit as error:
            return Failed(reason="invalid", detail=str(error))
        except Rewritten as error:
            return Failed(reason="rewritten", detail=str(error))
        except Exception as error:  # noqa: BLE001 - a taskset may raise anything
            whose = repr(request.taskset) if isinstance(request, TasksetRequest) else "a play"
            trace = "".join(traceback.format_exception(error))
            return Failed(reason="raised", detail=f"{whose} raised {described(error)}", traceback=trace)

    async def _run(self, request: Request) -> Answer:
        match request:
            case Describe():
                return self._taskset(request).describe()
            case ReadTasks():
                rows = await self._taskset(request).rows(request.first, request.count, request.rendering)
                return TaskRows(rows=rows)
            case ScoreReply():
                return await self._taskset(request).score(request.task, request.reply)
            case BeginPlay():
                play = await self._taskset(request).begin(request.task, request.rendering, request.prompt_ids)
                self._plays[request.play] = play
            case TakeTurn():
                play = self._play(request.play)
                play.take(request.token_ids, cut_off=request.cut_off)
            case EndPlay():
                play = self._play(request.play)
                play.end()
        state = await play.state()
        if isinstance(state, Scored):
            return PlayState(scored=state)
        return PlayState(answer=state)

    def _play(self, name: str) -> Play:
        if name not in self._plays:
            raise Unfit("its play is lost: the process was restarted")
        return self._plays[name]

    def _taskset(self, request: TasksetRequest) -> LoadedTaskset:
        key = json.dumps([request.taskset, request.options], sort_keys=True)
        if key not in self._tasksets:
            self._tasksets[key] = self._load(request.taskset, request.options)
        return self._tasksets[key]


def main(pipes: ModuleType) -> None:
    """Answer requests to the tasksets of verifiers; `pipes` is `replaybuf.wire.pipes`."""
    from .loaded import LoadedTaskset
    from .plays import TurnServer

    turns = TurnServer()
    run(_version, lambda name, options: LoadedTaskset(name, options, turns), pipes)


def run(version: Callable[[], str], load: Load, pipes: ModuleType) -> None:
    """Answer requests until standard input ends. `version` raises `ImportError` without verifiers."""
    stream, send = pipes.claim_pipes()
    # Last, not first as for a script: a folder called `datasets` there must not hide the library of that name.
    sys.path.append(str(Path.cwd()))
    # Tool servers of a taskset are processes that import its module.
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())])
    try:
        send(0, Ready(version=version()))
    except ImportError as error:
        send(0, Failed(reason="missing", detail=described(error)))
        return
    requests = pipes.received(stream, msgspec.msgpack.Decoder(Request | Command))
    asyncio.run(_serve(requests, Worker(load, send)))


def _version() -> str:
    import verifiers
    import verifiers.v1  # older versions do not have it

    return str(verifiers.__version__)


async def _serve(requests: Numbered, worker: Worker) -> None:
    threading.Thread(target=_read, args=(requests, asyncio.get_running_loop(), worker), daemon=True).start()
    await asyncio.Event().wait()  # the reading thread ends the process


def _read(requests: Numbered, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
    for number, request in requests:
        loop.call_soon_threadsafe(worker.take, number, request)
    # The generator is gone. Exit functions end what verifiers started. They run here, because the main thread may be
    # in the middle of anything.
    late = threading.Timer(EXIT_S, os._exit, [0])
    late.daemon = True
    late.start()
    atexit._run_exitfuncs()
    os._exit(0)
