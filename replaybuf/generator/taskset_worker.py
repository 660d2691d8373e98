"""The process that runs a verifiers taskset: `PYTHON -P taskset_worker.py`. Started by `TasksetProcess`.

Its interpreter may be another than the generator's, so that imports here are the standard library, msgspec and
verifiers alone, and verifiers only once the process runs: its parent takes the messages from this module.

Requests come by standard input and answers leave by standard output, msgpack behind their length (4 bytes,
little-endian). An answer has the number of its request; 0 is the process itself, which says first that it is ready.
Whatever a taskset prints goes to standard error. The process ends when its standard input does, in the middle of a
reward too, so that none outlives a generator that was killed.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import msgspec

LENGTH = struct.Struct("<I")
_THINK, _THOUGHT = "<think>", "</think>"
_NO_RUNTIME = ("setup", "finalize", "stage_verifier")


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the generator asks; the generator gives the numbers, from 1 on."""

    number: int = 0


class Cancel(Request, frozen=True, kw_only=True, tag=True):
    """Give up the request of this number. It is answered by `Failed` all the same."""


class OfTaskset(Request, frozen=True, kw_only=True, tag=True):
    """A request to a taskset: its id, as verifiers knows it, and the fields of its configuration."""

    taskset: str
    options: dict[str, Any] = {}


class Describe(OfTaskset, frozen=True, kw_only=True, tag=True):
    """Say what a taskset is; answered by `Described`."""


class ReadTasks(OfTaskset, frozen=True, kw_only=True, tag=True):
    """Read the tasks from the place `first` on, `count` at most; answered by `TaskRows`, none at the end."""

    first: int
    count: int


class ScoreReply(OfTaskset, frozen=True, kw_only=True, tag=True):
    """Score one reply to the prompt of a task; `task` as `TaskRow` tells it. Answered by `Scored`."""

    task: dict[str, Any]
    reply: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer: verifiers of this version is there."""

    number: int = 0
    version: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why there is no answer. `reason`: `missing` (no verifiers), `invalid` (the request), `raised`, `cancelled`."""

    number: int
    reason: str
    detail: str


class Described(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`infinite`: its tasks never end. `unscorable`: why single replies cannot be scored, None where they can."""

    number: int
    infinite: bool
    unscorable: str | None


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task.

    `task_id` is its own id, its own key or the hash of its data; `messages` as a chat template takes them, none where a
    user opens; `answer` of its data where that is text or a number; `task` all of its data; `needs` what it asks for
    beyond a prompt.
    """

    task_id: str
    messages: list[dict[str, Any]]
    answer: str | int | float | None
    task: dict[str, Any]
    needs: list[str]


class TaskRows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rows of consecutive tasks."""

    number: int
    rows: list[TaskRow]


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`reward` is sum(weight x score) of the taskset's rewards; `rewards` the scores; `metrics` count for nothing."""

    number: int
    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]


Work: TypeAlias = Describe | ReadTasks | ScoreReply
Requests: TypeAlias = Cancel | Work
Answer: TypeAlias = Ready | Failed | Described | TaskRows | Scored


Load: TypeAlias = Callable[[str, dict[str, Any]], "Taskset"]


class Unfit(Exception):
    """What was asked for cannot be had of this taskset."""


class Taskset(Protocol):
    """What the process answers for; `LoadedTaskset` is one."""

    infinite: bool

    def unscorable(self) -> str | None:
        """Say why a reply alone cannot be scored; None where it can."""

    def rows(self, first: int, count: int) -> list[TaskRow]:
        """Return rows by place."""

    async def score(self, data: dict[str, Any], reply: str, number: int) -> Scored:
        """Score a reply to the task with these data."""


class LoadedTaskset:
    """A taskset of verifiers, and where it was read to."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        from verifiers.v1.utils import loaders

        self.name = name
        try:
            config = loaders.taskset_config_type(name).model_validate({"id": name, **options})
            self._taskset = loaders.load_taskset(config)
        except Exception as error:
            raise Unfit(f"taskset {name!r} does not load: {told(error)}") from error
        self.infinite = not self._taskset.bounded
        self._task_type = type(self._taskset).task_type()
        self._restart()

    def _restart(self) -> None:
        self._tasks: Iterator[Any] = iter(self._taskset)
        self._next = 0

    def rows(self, first: int, count: int) -> list[TaskRow]:
        """Return rows by place. The taskset goes forward only, so a place before the last read one starts it anew."""
        if first < self._next:
            self._restart()
        tasks = list(itertools.islice(self._tasks, first - self._next, first - self._next + count))
        self._next = first + len(tasks)
        return [task_row(task) for task in tasks]

    async def score(self, data: dict[str, Any], reply: str, number: int) -> Scored:
        """Score a reply by all rewards, metrics and judges of the task with these data."""
        # As verifiers' own environment server makes tasks.
        task = self._task_type(self._task_type.data_type().model_validate(data), self._taskset.config.task)
        trace = replied(task, reply)
        await task.score(trace)
        return scored(trace, number)

    def unscorable(self) -> str | None:
        """Say why a reply alone cannot be scored; None where it can."""
        self._restart()
        task = next(self._tasks, None)
        if task is None:
            return "holds no task"
        self._tasks = itertools.chain([task], self._tasks)  # a data set is not loaded twice
        return next(self._more_than_a_reply(task), None)

    def _more_than_a_reply(self, task: Any) -> Iterator[str]:
        import verifiers.v1 as vf
        from verifiers.v1.utils.decorators import discover_decorated

        environment, harness = vf.environment_class(self.name), vf.default_harness_id(self.name)
        if environment is not vf.SingleAgentEnv:
            yield f"has an environment of its own, {environment.__name__}"
        if harness == self.name:
            yield "has a harness of its own"
        if self._taskset.toolsets(self._taskset.config) or task.toolsets(task.config):
            yield "has tools"
        if task.NEEDS_CONTAINER:
            yield "needs a container (NEEDS_CONTAINER)"
        for hook in _NO_RUNTIME:
            if getattr(type(task), hook) is not getattr(vf.Task, hook):
                yield f"has {hook}, which needs a runtime"
        for hook in (*task.hooks("stop"), *discover_decorated(task, "intercept")):
            yield f"has {hook.__name__}, which decides about requests to a model"
        scoring = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
        for hook in scoring:
            if needs_runtime(hook):
                yield f"has {getattr(hook, '__name__', 'a judge')}, which needs a runtime"
        if not task.hooks("reward") and not task.plugged_judges():
            yield "has no reward"
        excluded = [name for name, field in type(task.data).model_fields.items() if field.exclude]
        if excluded:
            yield f"leaves {', '.join(excluded)} out of the data of its tasks"


def needs_runtime(hook: Callable[..., Any]) -> bool:
    """Say whether a reward cannot be called without a runtime, as `Task.score` decides it."""
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def task_row(task: Any) -> TaskRow:
    """Describe a task of verifiers."""
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.task import Task, task_key

    data = task.data
    content = data.model_dump(mode="json", exclude_defaults=True)
    # The place of a task is left out: an id outlives a new order of the rows.
    own = type(task).key is not Task.key
    task_id = data.id or (task.key if own else task_key({k: v for k, v in content.items() if k != "idx"})[:16])
    messages = [flat(message_to_wire(message)) for message in opening(data)]
    answer = content.get("answer")
    needs = [name for name in ("image", "agent_user", "skills", "artifacts") if content.get(name)]
    if any(not isinstance(message.get("content"), str) for message in messages):
        needs.append("images in its prompt")
    return TaskRow(
        task_id=task_id,
        messages=messages,
        answer=answer if isinstance(answer, str | int | float) else None,
        task=content,
        needs=needs,
    )


def opening(data: Any) -> list[Any]:
    """Return the messages a task opens with; none where its user opens."""
    import verifiers.v1 as vf

    if data.prompt is None:
        return []
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    return [vf.SystemMessage(content=data.system_prompt), *prompt] if data.system_prompt else prompt


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """Put the text parts of a message's content into one text; with other parts it stays as it is."""
    parts = message.get("content")
    if isinstance(parts, list) and all(part.get("type") == "text" for part in parts):
        return {**message, "content": "\n".join(part["text"] for part in parts)}
    return message


def thought_and_said(reply: str) -> tuple[str | None, str]:
    """Split a reply into reasoning and content. A template may write the opening tag, so the closing one decides."""
    thought, closed, said = reply.partition(_THOUGHT)
    if closed:
        return thought.strip().removeprefix(_THINK).strip(), said.strip()
    if reply.lstrip().startswith(_THINK):
        return reply.strip().removeprefix(_THINK).strip(), ""
    return None, reply


def replied(task: Any, reply: str) -> Any:
    """Make the trace of a task whose prompt got a reply, as a rollout of one turn leaves it."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    trace: Any = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    thought, said = thought_and_said(reply)
    messages = [*opening(task.data), vf.AssistantMessage(content=said, reasoning_content=thought)]
    trace.nodes = [
        vf.MessageNode(parent=place - 1 if place else None, message=message, sampled=place == len(messages) - 1)
        for place, message in enumerate(messages)
    ]
    trace.stop("agent_completed")
    return trace


def scored(trace: Any, number: int) -> Scored:
    """Read what a trace was scored with. Raises `Unfit` where a reward was not."""
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        raise Unfit(f"reward {', '.join(missing) or 'of any name'} was not given")
    return Scored(
        number=number,
        reward=float(trace.reward),
        rewards={name: reward.score for name, reward in trace.rewards.items()},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
    )


class Worker:
    """Does many requests at the same time, in one event loop: most rewards wait for others, or are quick."""

    def __init__(self, load: Load, send: Callable[[Answer], None]) -> None:
        self._load = load
        self._send = send
        self._tasksets: dict[str, Taskset] = {}
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
        except Exception as error:  # noqa: BLE001 - whatever a taskset raises is its author's to read
            return Failed(number=request.number, reason="raised", detail=f"{request.taskset!r} raised {told(error)}")

    async def _done(self, request: Work) -> Answer:
        number = request.number
        match request:
            case Describe():
                taskset = self._taskset(request)
                return Described(number=number, infinite=taskset.infinite, unscorable=taskset.unscorable())
            case ReadTasks():
                return TaskRows(number=number, rows=self._taskset(request).rows(request.first, request.count))
            case ScoreReply():
                return await self._taskset(request).score(request.task, request.reply, number)

    def _taskset(self, request: OfTaskset) -> Taskset:
        key = json.dumps([request.taskset, request.options], sort_keys=True)
        if key not in self._tasksets:
            self._tasksets[key] = self._load(request.taskset, request.options)
        return self._tasksets[key]


def told(error: BaseException) -> str:
    """Say what was raised, and by whom where verifiers wrapped it."""
    return f"{type(error).__name__}: {error}"


def framed(message: Requests | Answer) -> bytes:
    """Encode a message behind its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def main() -> None:
    """Answer for the tasksets of verifiers."""
    run(_version, LoadedTaskset)


def run(version: Callable[[], str], load: Load) -> None:
    """Answer request after request until standard input ends. `version` raises `ImportError` where there is none."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # Last, not first as for a script: a folder called `datasets` there must not hide the library of that name.
    sys.path.append(str(Path.cwd()))

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
    os._exit(0)  # the generator is gone: nobody waits for what is being scored


if __name__ == "__main__":
    main()
