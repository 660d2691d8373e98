"""One taskset of verifiers: its tasks as rows, and what a reply to one of them is worth."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .faults import Unfit, told
from .messages import Described, Rendering, Scored, TaskRow
from .playing import Player, agents_of, own_harness
from .plays import Play, TurnServer

_THINK, _THOUGHT = "<think>", "</think>"


class LoadedTaskset:
    """A taskset of verifiers, and where it was read to."""

    def __init__(self, name: str, options: dict[str, Any], turns: TurnServer) -> None:
        from verifiers.v1.utils import loaders

        self.name = name
        try:
            config = loaders.taskset_config_type(name).model_validate({"id": name, **options})
            self._taskset = loaders.load_taskset(config)
        except Exception as error:
            raise Unfit(f"taskset {name!r} does not load: {told(error)}") from error
        self.infinite = not self._taskset.bounded
        self._task_type = type(self._taskset).task_type()
        self._player = Player(name, options, turns, opening=opening, scored=scored)
        self._restart()

    def _restart(self) -> None:
        self._tasks: Iterator[Any] = iter(self._taskset)
        self._next = 0

    async def rows(self, first: int, count: int, rendering: Rendering | None) -> list[TaskRow]:
        """Return rows by place. The taskset goes forward only, so a place before the last read one starts it anew."""
        if first < self._next:
            self._restart()
        tasks = list(itertools.islice(self._tasks, first - self._next, first - self._next + count))
        self._next = first + len(tasks)
        rows = [task_row(task) for task in tasks]
        if rendering is None:
            return rows
        return [await self._opened(task, row, rendering) for task, row in zip(tasks, rows, strict=True)]

    async def _opened(self, task: Any, row: TaskRow, rendering: Rendering) -> TaskRow:
        if row.needs or not row.messages:
            return row
        return msgspec.structs.replace(row, prompt_ids=await self._player.opening_ids(task, rendering))

    async def score(self, data: dict[str, Any], reply: str, number: int) -> Scored:
        """Score a reply by all rewards, metrics and judges of the task with these data."""
        task = self._task(data)
        trace = replied(task, reply)
        await task.score(trace)
        return msgspec.structs.replace(scored(trace), number=number)

    async def begin(self, data: dict[str, Any], rendering: Rendering, prompt_ids: list[int]) -> Play:
        """Begin a play of the task with these data, whose first turn follows `prompt_ids`."""
        return await self._player.begin(self._task(data), rendering, prompt_ids)

    def _task(self, data: dict[str, Any]) -> Any:
        # As verifiers' own environment server makes tasks.
        return self._task_type(self._task_type.data_type().model_validate(data), self._taskset.config.task)

    def describe(self, number: int) -> Described:
        """Say whether its tasks end, and what they take."""
        self._restart()
        task = next(self._tasks, None)
        if task is None:
            return Described(number=number, infinite=self.infinite, plays=None, unfit="holds no task")
        self._tasks = itertools.chain([task], self._tasks)  # a data set is not loaded twice
        plays, unfit = next(self._more_than_a_reply(task), None), next(self._out_of_reach(task), None)
        return Described(number=number, infinite=self.infinite, plays=plays, unfit=unfit)

    def _more_than_a_reply(self, task: Any) -> Iterator[str]:
        """Yield why its tasks are played."""
        import verifiers.v1 as vf
        from verifiers.v1.utils.decorators import discover_decorated

        environment = vf.environment_class(self.name)
        if environment is not vf.SingleAgentEnv:
            yield f"has an environment of its own, {environment.__name__}"
        if own_harness(self.name):
            yield "has a harness of its own"
        if self._toolsets(task):
            yield "has tools"
        for hook in ("setup", "finalize"):
            if getattr(type(task), hook) is not getattr(vf.Task, hook):
                yield f"has {hook}"
        for hook in (*task.hooks("stop"), *discover_decorated(task, "intercept")):
            yield f"has {hook.__name__}, which decides about requests to a model"
        scoring = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
        for hook in scoring:
            if needs_runtime(hook):
                yield f"has {getattr(hook, '__name__', 'a judge')}, which needs a runtime"

    def _out_of_reach(self, task: Any) -> Iterator[str]:
        """Yield why its tasks can be neither replied to nor played here."""
        import verifiers.v1 as vf
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.utils import loaders

        agents, harness = agents_of(self.name), own_harness(self.name)
        if len(agents) != 1:
            yield f"has {len(agents)} agents: {', '.join(agents)}"
        if any(agent.client is not None or agent.model is not None for agent in agents.values()):
            yield "has an agent with a model of its own"
        if harness is not None and (harness != self.name or loaders.harness_class(harness).NEEDS_CONTAINER):
            yield f"has the harness {harness}, which needs a container or runs commands of the model"
        if task.NEEDS_CONTAINER:
            yield "needs a container (NEEDS_CONTAINER)"
        if type(task).stage_verifier is not vf.Task.stage_verifier:
            yield "has stage_verifier, which needs a second runtime"
        for toolset in self._toolsets(task):
            if not isinstance(toolset.config.runtime, SubprocessConfig):
                yield f"has tools in a runtime of type {toolset.config.runtime.type}"
        if not task.hooks("reward") and not task.plugged_judges():
            yield "has no reward"
        excluded = [name for name, field in type(task.data).model_fields.items() if field.exclude]
        if excluded:
            yield f"leaves {', '.join(excluded)} out of the data of its tasks"

    def _toolsets(self, task: Any) -> list[Any]:
        return [*self._taskset.toolsets(self._taskset.config), *task.toolsets(task.config)]


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


def scored(trace: Any) -> Scored:
    """Read what a trace was scored with. Raises `Unfit` where a reward was not."""
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        raise Unfit(f"reward {', '.join(missing) or 'of any name'} was not given")
    return Scored(
        reward=float(trace.reward),
        rewards={name: reward.score for name, reward in trace.rewards.items()},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
    )
