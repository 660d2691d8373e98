"""A taskset whose tasks are played: verifiers runs its environment, harness, tools and hooks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from .messages import PlayFailed, Rendering, Scored, Unfit, described
from .plays import Play, TurnServer
from .rendering import check_template, opening_ids, renderer_config
from .traces import opening, scores_of

MODEL = "policy"
NO_KEY = "REPLAYBUF_NO_KEY"
"""Unset environment variable: verifiers needs the name of one for an API key; the loopback server takes none."""


def agents_of(name: str) -> dict[str, Any]:
    """Return the agents that the environment of a taskset declares, by their names."""
    import verifiers.v1 as vf
    from verifiers.v1.utils import loaders

    fields = loaders.env_config_type(name).model_fields
    return {field: info.default for field, info in fields.items() if isinstance(info.default, vf.AgentConfig)}


def own_harness(name: str) -> str | None:
    """Return the id of the harness that a taskset, or the agent of its environment, declares."""
    from verifiers.v1.utils import loaders

    for agent in agents_of(name).values():
        if agent.harness is not None:
            pinned: str = agent.harness.id
            return pinned if pinned != "null" else None
    default: str = loaders.default_harness_id(name)
    return default if default == name else None


class Player:
    """Plays the tasks of one taskset, whose environment has one agent."""

    def __init__(self, name: str, options: dict[str, Any], turns: TurnServer) -> None:
        self._name = name
        self._options = options
        self._turns = turns
        self._starting = asyncio.Lock()
        self._environment: Any = None
        self._serving = contextlib.AsyncExitStack()  # never closed: what it starts ends with the process
        self._tools: dict[str, list[dict[str, Any]]] = {}

    async def begin(self, task: Any, rendering: Rendering, prompt_ids: list[int]) -> Play:
        """Begin a play whose first turn follows `prompt_ids`."""
        await self._start()
        play = Play(prompt_ids)
        play.start(self._run(task, rendering, play, lambda trace: None))
        return play

    async def opening_ids(self, task: Any, rendering: Rendering) -> list[int]:
        """Return the token ids that a play of this task begins with. The first task is played up to there.

        Raises `Unfit` if it cannot be played.
        """
        key = json.dumps([rendering.tokenizer, rendering.renderer], sort_keys=True)
        if key not in self._tools:
            self._tools[key] = await self._try_play(task, rendering)
        return opening_ids(rendering, opening(task.data), self._tools[key])

    async def _try_play(self, task: Any, rendering: Rendering) -> list[dict[str, Any]]:
        """Begin a play, check that it opens like its prompt, and return the tools that it offers the model."""
        from .chat import tools_of

        messages = opening(task.data)
        opening_ids(rendering, messages, [])  # its errors are clearer than the HTTP status that the play would get
        play, traces = Play(None), []

        def record(trace: Any) -> None:
            traces.append(trace.id)
            tools_of[trace.id] = []

        try:
            await self._start()
            play.start(self._run(task, rendering, play, record))
            state = await play.state()
        except Unfit:
            raise
        except Exception as error:
            raise Unfit(f"taskset {self._name} cannot be played: {described(error)}") from error
        finally:
            play.drop()
            offered = [tools for trace in traces for tools in tools_of.pop(trace)]
        if isinstance(state, Scored):
            raise Unfit(f"taskset {self._name} cannot be played: it ends before the first turn of its model")
        if opening_ids(rendering, messages, offered) != state:
            raise Unfit(f"taskset {self._name} cannot be played: it opens with more than prompt and tools")
        check_template(rendering, messages, offered)
        return offered

    async def _start(self) -> None:
        """Start what all plays share: the environment, its tool servers, and the turn server."""
        async with self._starting:
            if self._environment is not None:
                return
            await self._turns.start()
            environment = self._new_environment()
            await self._serving.enter_async_context(environment.serving())
            self._environment = environment

    def _new_environment(self) -> Any:
        from verifiers.v1.utils import loaders

        from .chat import HARNESS

        (agent,) = agents_of(self._name)
        config = {
            "taskset": {"id": self._name, **self._options},
            agent: {"harness": {"id": own_harness(self._name) or HARNESS}, "runtime": {"type": "subprocess"}},
            "interception": {"type": "server"},
        }
        return loaders.load_environment(loaders.resolve_env_config(config))

    async def _run(self, task: Any, rendering: Rendering, play: Play, on_trace: Callable[[Any], None]) -> Scored:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import TrainClientConfig

        client = TrainClientConfig(
            base_url=self._turns.url,
            api_key_var=NO_KEY,
            renderer=renderer_config(rendering),
            renderer_model_name=rendering.tokenizer,
        )
        traces: list[str] = []

        def register(trace: Any) -> None:
            traces.append(trace.id)
            self._turns.add(play, trace)
            on_trace(trace)

        try:
            episode = await self._environment.run_episode(task, ModelContext(MODEL, client), on_trace=register)
        finally:
            for trace_id in traces:
                self._turns.remove(trace_id)
        return _episode_scores(episode)


def _episode_scores(episode: Any) -> Scored:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise PlayFailed(f"{errors[-1].type}: {errors[-1].message}" if errors else "it ended without an error")
    if len(episode.traces) != 1:
        raise PlayFailed(f"its environment ran the agent {len(episode.traces)} times; a rollout is one run")
    return scores_of(episode.traces[0])
