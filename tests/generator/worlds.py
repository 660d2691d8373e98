"""A generator between an engine and a service that answer by script over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from replaybuf.client.client import AsyncClient
from replaybuf.generator.daemon import Daemon, Follower
from replaybuf.generator.daemon_options import DaemonOptions
from replaybuf.generator.engines import Sampling, VllmEngine
from replaybuf.generator.environments import Environment, MultiTurnEnvironment, Reward
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.prompts import PromptOrder, Prompts
from replaybuf.generator.stage.logprobs import EngineStage
from replaybuf.generator.stage.stages import Stage
from tests.generator.doubles import (
    TIMEOUT_S,
    EngineDouble,
    Gate,
    Script,
    ServiceDouble,
    Spelling,
    make_prompt,
    make_tokenizer,
)

T = TypeVar("T")

WORDS = ("abc", "abd", "bcd", "cd")


@dataclasses.dataclass
class World:
    """A generator with its engine and service; `start` begins it, `end` waits for its end."""

    engine: EngineDouble
    service: ServiceDouble
    daemon: Daemon
    server: VllmEngine
    stop: asyncio.Event
    task: asyncio.Task[None] | None = None

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons of the returned tickets."""
        return {ticket: text.partition(":")[0] for ticket, text in self.service.returned}

    @property
    def stored(self) -> list[int]:
        """Prompt indexes of the stored groups, sorted."""
        return sorted(group.prompt_index or 0 for group in self.service.groups)

    def start(self) -> None:
        """Start the generator."""
        self.task = asyncio.create_task(self.daemon.run(self.stop))

    async def end(self) -> None:
        """Wait for its end."""
        assert self.task is not None
        await self.task

    async def run(self) -> None:
        """Run it to its end."""
        self.start()
        await self.end()


@contextlib.asynccontextmanager
async def world(
    folder: Path,
    engine: EngineDouble,
    service: ServiceDouble,
    *,
    environment: Environment | Sequence[Reward] | None = None,
    turns: MultiTurnEnvironment | None = None,
    reward_timeout_s: float = TIMEOUT_S,
    engine_timeout_s: float = TIMEOUT_S,
    patience_s: float = TIMEOUT_S,
    max_staleness: int | None = None,
    stages: Sequence[Stage] = (),
    prompts: PromptOrder | None = None,
    followers: Sequence[Follower] = (),
    serve: bool = True,
    **options: Any,
) -> AsyncIterator[World]:
    """Serve engine and service, and build the generator; `options` are those of `DaemonOptions`."""
    sampling = Sampling(n=service.config["group_size"], max_tokens=8)
    settings: dict[str, Any] = {"producer": "me", "sampling": sampling, "poll_wait_ms": 100}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(engine.up())
        if serve:
            await stack.enter_async_context(service.up())
        client = await stack.enter_async_context(AsyncClient(service.url, "r", timeout_s=TIMEOUT_S))
        server = VllmEngine(engine.url, timeout_s=engine_timeout_s)
        fleet = Fleet([server], patience_s=patience_s, max_staleness=max_staleness)
        stack.push_async_callback(fleet.aclose)
        tokenizer = make_tokenizer(folder)
        daemon = Daemon(
            client,
            fleet,
            Scorer(environment or Spelling(), timeout_s=reward_timeout_s)
            if turns is None
            else Episodes(turns, tokenizer, max_turns=2, timeout_s=reward_timeout_s),
            prompts or Prompts([make_prompt(word) for word in WORDS], shuffle=False),
            tokenizer,
            DaemonOptions(**settings | options),
            stages,
            followers,
        )
        yield World(engine, service, daemon, server, asyncio.Event())


@contextlib.asynccontextmanager
async def started(*parts: Any, **options: Any) -> AsyncIterator[World]:
    """Start a world, and stop it at the end of the block if it has not ended."""
    async with world(*parts, **options) as w:
        w.start()
        yield w
        w.stop.set()
        await w.end()


@contextlib.asynccontextmanager
async def gated(
    folder: Path, service: ServiceDouble, requests: int, **options: Any
) -> AsyncIterator[tuple[World, Gate]]:
    """Start a world whose engine has `requests` requests and answers none until the gate opens."""
    gate, engine = Gate(), EngineDouble()
    engine.always = gate
    async with started(folder, engine, service, **options) as w:
        await gate.requests(requests)
        yield w, gate


def completed(folder: Path, service: ServiceDouble, engine: EngineDouble | None = None, **options: Any) -> World:
    """Run a world to its end and return it."""

    async def main() -> World:
        async with world(folder, engine or EngineDouble(), service, **options) as w:
            await w.run()
        return w

    return run(main())


def failed(
    folder: Path, service: ServiceDouble, engine: EngineDouble | None = None, **options: Any
) -> tuple[World, BaseException]:
    """Run a world that ends with one error; return both."""

    async def main() -> tuple[World, BaseException]:
        async with world(folder, engine or EngineDouble(), service, **options) as w:
            with pytest.raises(BaseExceptionGroup) as caught:
                await w.run()
        (error,) = caught.value.exceptions
        return w, error

    return run(main())


@contextlib.asynccontextmanager
async def reference(engine: EngineDouble) -> AsyncIterator[EngineStage]:
    """Open a stage that asks `engine` for reference logprobs."""
    stage = EngineStage("ref_logprobs", [VllmEngine(engine.url, timeout_s=TIMEOUT_S)], micro_batch=4, patience_s=0.1)
    await stage.prepare(TIMEOUT_S, policy=())
    try:
        yield stage
    finally:
        await stage.aclose()


def sampled_by(version: int, gate: Gate | None = None) -> Script:
    """Script: the usual answer with this version, whatever version the engine has then."""

    async def script(request: dict[str, Any]) -> dict[str, Any]:
        if gate is not None:
            await gate(request)
        return EngineDouble(version=version).answer(request)

    return script


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine within the time limit."""

    async def bounded() -> T:
        async with asyncio.timeout(TIMEOUT_S):
            return await main

    return asyncio.run(bounded())
