"""A taskset whose tasks are played: verifiers runs its environment, harness, tools and hooks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from .faults import PlayFailed, Unfit, told
from .messages import Rendering, Scored
from .plays import Play, TurnServer
from .rendering import check_template, opening_ids, renderer_config

MODEL = "policy"
NO_KEY = "REPLAYBUF_NO_KEY"
"""Environment variable that verifiers would take a key for the loopback port from; there is none."""


def agents_of(name: str) -> dict[str, Any]:
    """Return the agents that the environment of a taskset declares, by their names."""
    import verifiers.v1 as vf
    from verifiers.v1.utils import loaders

    fields = loaders.env_config_type(name).model_fields
    return {field: info.default for field, info in fields.items() if isinstance(info.default, vf.AgentConfig)}


def own_harness(name: str) -> str | None:
    """Return the id of the harness that a taskset, or the agent of its environment, names itself."""
    from verifiers.v1.utils import loaders

    for agent in agents_of(name).values():
        if agent.harness is not None:
            pinned: str = agent.harness.id
            return pinned if pinned != "null" else None
    default: str = loaders.default_harness_id(name)
    return default if default == name else None


class Player:
    """Plays the tasks of one taskset, whose environment has one agent.

    `opening` returns the messages that a task opens with, `scored` reads what a trace was scored with.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        turns: TurnServer,
        *,
        opening: Callable[[Any], list[Any]],
        scored: Callable[[Any], Scored],
    ) -> None:
        self._name = name
        self._options = options
        self._turns = turns
        self._opening = opening
        self._scored = scored
        self._starting = asyncio.Lock()
        self._environment: Any = None
        self._serving = contextlib.AsyncExitStack()  # as long as the process: what it starts ends with that
        self._tools: dict[str, list[dict[str, Any]]] = {}

    async def begin(self, task: Any, rendering: Rendering, prompt_ids: list[int]) -> Play:
        """Begin a play whose first turn follows `prompt_ids`."""
        await self._ready()
        play = Play(prompt_ids)
        play.start(self._episode(task, rendering, play, lambda trace: None))
        return play

    async def opening_ids(self, task: Any, rendering: Rendering) -> list[int]:
        """Return the token ids that a play of this task begins with; the first task is played up to there.

        Raises `Unfit` where it cannot be played.
        """
        key = json.dumps([rendering.tokenizer, rendering.renderer], sort_keys=True)
        if key not in self._tools:
            self._tools[key] = await self._tried(task, rendering)
        return opening_ids(rendering, self._opening(task.data), self._tools[key])

    async def _tried(self, task: Any, rendering: Rendering) -> list[dict[str, Any]]:
        """Begin a play, see that it opens as its prompt does, and return the tools it offers the model."""
        from .chat import tools_of

        opening_ids(rendering, self._opening(task.data), [])  # says what is wrong, where the play would get a status
        play, traces = Play(None), []

        def minted(trace: Any) -> None:
            traces.append(trace.id)
            tools_of[trace.id] = []

        try:
            await self._ready()
            play.start(self._episode(task, rendering, play, minted))
            stood = await play.standing()
        except Unfit:
            raise
        except Exception as error:
            raise Unfit(f"taskset {self._name} cannot be played: {told(error)}") from error
        finally:
            play.drop()
            offered = [tools for trace in traces for tools in tools_of.pop(trace)]
        if isinstance(stood, Scored):
            raise Unfit(f"taskset {self._name} cannot be played: it ends before its model is asked for a turn")
        messages = self._opening(task.data)
        if opening_ids(rendering, messages, offered) != stood:
            raise Unfit(f"taskset {self._name} cannot be played: it opens with more than prompt and tools")
        check_template(rendering, messages, offered)
        return offered

    async def _ready(self) -> None:
        """Start what all plays share: the environment, its tool servers, and where turns are asked for."""
        async with self._starting:
            if self._environment is not None:
                return
            await self._turns.start()
            environment = self._made()
            await self._serving.enter_async_context(environment.serving())
            self._environment = environment

    def _made(self) -> Any:
        from verifiers.v1.utils import loaders

        from .chat import HARNESS

        (agent,) = agents_of(self._name)
        config = {
            "taskset": {"id": self._name, **self._options},
            agent: {"harness": {"id": own_harness(self._name) or HARNESS}, "runtime": {"type": "subprocess"}},
            "interception": {"type": "server"},
        }
        return loaders.load_environment(loaders.resolve_env_config(config))

    async def _episode(self, task: Any, rendering: Rendering, play: Play, minted: Callable[[Any], None]) -> Scored:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import TrainClientConfig

        client = TrainClientConfig(
            base_url=self._turns.url,
            api_key_var=NO_KEY,
            renderer=renderer_config(rendering),
            renderer_model_name=rendering.tokenizer,
        )
        traces: list[str] = []

        def seen(trace: Any) -> None:
            traces.append(trace.id)
            self._turns.add(play, trace)
            minted(trace)

        try:
            episode = await self._environment.run_episode(task, ModelContext(MODEL, client), on_trace=seen)
        finally:
            for trace_id in traces:
                self._turns.remove(trace_id)
        return self._judged(episode)

    def _judged(self, episode: Any) -> Scored:
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it ended without an error"
            raise PlayFailed(why)
        if len(episode.traces) != 1:
            raise PlayFailed(f"its environment ran the agent {len(episode.traces)} times; a rollout is one run")
        return self._scored(episode.traces[0])
