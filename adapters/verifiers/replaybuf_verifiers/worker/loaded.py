"""One taskset of verifiers: its tasks as rows, and the scores of replies."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .messages import Described, Rendering, Scored, TaskRow, Unfit, described
from .playing import Player, agents_of, own_harness
from .plays import Play, TurnServer
from .traces import reply_trace, scores_of, task_row


class LoadedTaskset:
    """A taskset of verifiers, read up to a place."""

    def __init__(self, name: str, options: dict[str, Any], turns: TurnServer) -> None:
        from verifiers.v1.utils import loaders

        self.name = name
        try:
            config = loaders.taskset_config_type(name).model_validate({"id": name, **options})
            self._taskset = loaders.load_taskset(config)
        except Exception as error:
            raise Unfit(f"taskset {name!r} does not load: {described(error)}") from error
        self.infinite = not self._taskset.bounded
        self._task_type = type(self._taskset).task_type()
        self._player = Player(name, options, turns)
        self._restart()

    def _restart(self) -> None:
        self._tasks: Iterator[Any] = iter(self._taskset)
        self._next = 0

    async def rows(self, first: int, count: int, rendering: Rendering | None) -> list[TaskRow]:
        """Return rows by place. A taskset only goes forward, so an earlier place restarts it."""
        if first < self._next:
            self._restart()
        tasks = list(itertools.islice(self._tasks, first - self._next, first - self._next + count))
        self._next = first + len(tasks)
        rows = [task_row(task) for task in tasks]
        if rendering is None:
            return rows
        return [await self._with_opening(task, row, rendering) for task, row in zip(tasks, rows, strict=True)]

    async def _with_opening(self, task: Any, row: TaskRow, rendering: Rendering) -> TaskRow:
        if row.needs or not row.messages:
            return row
        return msgspec.structs.replace(row, prompt_ids=await self._player.opening_ids(task, rendering))

    async def score(self, data: dict[str, Any], reply: str) -> Scored:
        """Score a reply with all rewards, metrics and judges of the task with these data."""
        task = self._task(data)
        trace = reply_trace(task, reply)
        await task.score(trace)
        return scores_of(trace)

    async def begin(self, data: dict[str, Any], rendering: Rendering, prompt_ids: list[int]) -> Play:
        """Begin a play of the task with these data, whose first turn follows `prompt_ids`."""
        return await self._player.begin(self._task(data), rendering, prompt_ids)

    def _task(self, data: dict[str, Any]) -> Any:
        # As verifiers' own environment server makes tasks.
        return self._task_type(self._task_type.data_type().model_validate(data), self._taskset.config.task)

    def describe(self) -> Described:
        """Describe its tasks, by the first one."""
        self._restart()
        task = next(self._tasks, None)
        if task is None:
            return Described(infinite=self.infinite, plays=None, unfit="holds no task")
        self._tasks = itertools.chain([task], self._tasks)  # a data set is not loaded twice
        plays, unfit = next(self._play_reasons(task), None), next(self._unfit_reasons(task), None)
        return Described(infinite=self.infinite, plays=plays, unfit=unfit)

    def _play_reasons(self, task: Any) -> Iterator[str]:
        """Yield why its tasks take more than one reply."""
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
            if _needs_runtime(hook):
                yield f"has {getattr(hook, '__name__', 'a judge')}, which needs a runtime"

    def _unfit_reasons(self, task: Any) -> Iterator[str]:
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
            yield f"excludes {', '.join(excluded)} from the data of its tasks"

    def _toolsets(self, task: Any) -> list[Any]:
        return [*self._taskset.toolsets(self._taskset.config), *task.toolsets(task.config)]


def _needs_runtime(hook: Callable[..., Any]) -> bool:
    """Return whether a reward requires a runtime, by the rule of `Task.score`."""
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
