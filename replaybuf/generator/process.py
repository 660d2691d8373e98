"""`replaybuf generate` as a process: what it needs is found, signals are heeded, metrics are served."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from replaybuf.client.client import AsyncClient
from replaybuf.errors import Invalid
from replaybuf.generator.daemon import Daemon, DaemonOptions
from replaybuf.generator.engines import Sampling, Server, open_engine
from replaybuf.generator.environments import check_prompts, load_rewards, multi_turn
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.reward_pool import RewardPool
from replaybuf.generator.environments.scoring import Scorer, Scoring
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.fleet.publication import OnPublish
from replaybuf.generator.logprobs import LogprobOptions, open_stages
from replaybuf.generator.metrics import exposition
from replaybuf.generator.preflight import (
    check_adapter,
    check_fit,
    check_group_size,
    check_tokenizer,
    check_vocabulary,
    held_out_set,
    max_staleness,
    wait_for_run,
    warn_of_overlap,
)
from replaybuf.generator.prompts.curriculum import Supply
from replaybuf.generator.schedule import Schedule
from replaybuf.generator.scrape import scraped
from replaybuf.generator.staleness import StalenessBound
from replaybuf.wire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The options of `generate`, which describes them."""

    url: str
    run: str
    engines: tuple[str, ...]
    environment: str
    prompts: str
    tokenizer: Path
    max_tokens: int
    group_size: int | None
    adapter: str
    temperature: float
    seed: int | None
    shuffle: bool
    producer: str
    max_inflight_groups: int
    min_inflight_groups: int
    engine_timeout_s: float
    reward_timeout_s: float
    reward_processes: int
    max_turns: int
    start_timeout_s: float
    service_patience_s: float
    model: str | None
    logprobs_mode: str | None
    seed_requests: bool
    engine_api_key: str | None = dataclasses.field(repr=False)
    on_publish: OnPublish
    eval_prompts: str | None
    eval_every: int
    eval_environment: str | None
    eval_samples: int
    eval_temperature: float
    compress: bool
    metrics_file: Path | None
    report_every_s: float
    metrics_host: str
    metrics_port: int | None
    logprobs: LogprobOptions
    token: str | None = dataclasses.field(repr=False)

    def sampling(self, group_size: int, tokenizer: Tokenizer) -> Sampling:
        """Return how groups are sampled."""
        return Sampling(
            n=group_size,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop_token_ids=tokenizer.stop_token_ids,
        )


LIVE = ("max_inflight_groups", "min_inflight_groups", "temperature", "report_every_s")
"""Options that may change while the generator runs."""


def live_changes(before: GenerateOptions, after: GenerateOptions) -> dict[str, Any]:
    """Return the options that differ, by name. Raises `Invalid` where one does that is read at the start alone."""
    fields = [field.name for field in dataclasses.fields(before)]
    changed = {name: getattr(after, name) for name in fields if getattr(after, name) != getattr(before, name)}
    for name, value in changed.items():
        if name not in LIVE:
            told = value if GenerateOptions.__dataclass_fields__[name].repr else "another one"
            raise Invalid(
                f"{name} is now {told!r}; it is read at the start alone. Live are {', '.join(LIVE)}",
                name=name,
                value=told,
                bound=LIVE,
            )
    return changed


def _warn_of_raw_logprobs(servers: Sequence[Server], temperature: float) -> None:
    raw = [server.url for server in servers if server.logprobs_mode == "raw_logprobs"]
    if raw and temperature != 1.0:
        logger.warning(
            "temperature is %g, but raw logprobs do not contain it: they are not those of the distribution that was "
            "sampled; start %s with --logprobs-mode processed_logprobs",
            temperature,
            ", ".join(raw),
        )


Reread: TypeAlias = Callable[[], GenerateOptions]
"""Parses command line, environment and configuration file again. Raises `Invalid`."""


async def run_generator(options: GenerateOptions, reread: Reread | None = None) -> None:
    """Generate until the run is finished or a signal comes; with `reread`, SIGHUP reads the options again."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    servers = [
        open_engine(
            address,
            timeout_s=options.engine_timeout_s,
            model=options.model or options.adapter or None,
            logprobs_mode=options.logprobs_mode,
            api_key=options.engine_api_key,
        )
        for address in options.engines
    ]
    _warn_of_raw_logprobs(servers, options.temperature)
    engine = Fleet(servers, on_publish=options.on_publish)
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(options.url, options.run, token=options.token))
            exposed = await _exposed(options, stack)
            daemon = await _unless_stopped(stop, _prepared(options, client, engine, servers, stack))
            if daemon is not None:
                exposed.daemon = daemon
                async with _heeding_hangups(options, daemon, servers, reread):
                    await daemon.run(stop)
    finally:
        await engine.aclose()


@dataclasses.dataclass(slots=True)
class _Exposed:
    """What `/metrics` tells of; no daemon before everything it needs was found."""

    daemon: Daemon | None = None


async def _exposed(options: GenerateOptions, stack: AsyncExitStack) -> _Exposed:
    exposed = _Exposed()
    if options.metrics_port is not None:
        served = scraped(options.metrics_host, options.metrics_port, lambda: exposition(options.run, exposed.daemon))
        print(f"metrics at {await stack.enter_async_context(served)}/metrics", flush=True)
    return exposed


@contextlib.asynccontextmanager
async def _heeding_hangups(
    options: GenerateOptions, daemon: Daemon, servers: Sequence[Server], reread: Reread | None
) -> AsyncIterator[None]:
    """Read the options again at every SIGHUP. Without a configuration file the signal ends the process, as ever."""
    if reread is None:
        yield
        return
    hangup = asyncio.Event()

    async def heed() -> None:
        in_force = options
        while True:
            await hangup.wait()
            hangup.clear()
            in_force = await _reconfigured(in_force, daemon, servers, reread)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    heeding = asyncio.create_task(heed())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        heeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await heeding


async def _reconfigured(
    in_force: GenerateOptions, daemon: Daemon, servers: Sequence[Server], reread: Reread
) -> GenerateOptions:
    """Take what changed; return the options in force then. A change that cannot be taken changes nothing."""
    try:
        options = reread()
        changed = live_changes(in_force, options)
        await daemon.reconfigure(**changed)
    except Invalid as error:
        logger.error("options stay as they were: %s", error.detail)
        return in_force
    if "temperature" in changed:
        _warn_of_raw_logprobs(servers, options.temperature)
    logger.info("options read again; changed: %s", ", ".join(f"{k}={v}" for k, v in changed.items()) or "nothing")
    return options


async def _prepared(
    options: GenerateOptions, client: AsyncClient, engine: Fleet, servers: Sequence[Server], stack: AsyncExitStack
) -> Daemon:
    tokenizer = Tokenizer(options.tokenizer)
    supply = Supply(options.prompts, tokenizer)
    read = supply.known
    rewards = load_rewards(options.environment)
    check_prompts(rewards, read)
    facts = await wait_for_run(client, options.start_timeout_s)
    check_adapter(options.adapter, facts)
    check_vocabulary(facts, tokenizer)
    group_size = check_group_size(options.group_size, facts)
    engine.max_staleness = max_staleness(facts)
    await engine.prepare(options.start_timeout_s)
    await check_tokenizer(servers, tokenizer, read)
    stages = await open_stages(
        options.logprobs,
        stack,
        policy=servers,
        timeout_s=options.engine_timeout_s,
        start_timeout_s=options.start_timeout_s,
        api_key=options.engine_api_key,
    )
    model_bound = {"the engine's max_model_len": engine.max_model_len}
    bounds = model_bound | {f"what {stage.column} can be computed of": stage.max_tokens for stage in stages}
    check_fit(facts, read, group_size=group_size, max_tokens=options.max_tokens, longest=bounds)
    seed = facts.seed if options.seed is None else options.seed
    logger.info("generating: %d prompts, groups of %d, %d engines", len(read), group_size, len(options.engines))
    played = multi_turn(rewards)
    scoring: Scoring | Episodes
    if options.reward_processes:
        Scorer(rewards, timeout_s=options.reward_timeout_s)  # what it refuses, the processes would die of
        pool = RewardPool(options.environment, processes=options.reward_processes, timeout_s=options.reward_timeout_s)
        scoring = await stack.enter_async_context(pool)
    elif played is not None:
        scoring = Episodes(played, tokenizer, max_turns=options.max_turns, timeout_s=options.reward_timeout_s)
    else:
        scoring = Scorer(rewards, timeout_s=options.reward_timeout_s)
    schedule = None
    if options.eval_prompts is not None:
        schedule = _schedule(options, options.eval_prompts, tokenizer)
        warn_of_overlap(schedule.held_out.prompts, read)
        check_fit(
            facts,
            schedule.held_out.prompts,
            group_size=options.eval_samples,
            max_tokens=options.max_tokens,
            longest=model_bound,
        )
    return Daemon(
        client,
        engine,
        scoring,
        supply.ordered(seed=seed, shuffle=options.shuffle, check=lambda prompt: check_prompts(rewards, [prompt])),
        tokenizer,
        DaemonOptions(
            producer=options.producer,
            adapter=options.adapter,
            sampling=options.sampling(group_size, tokenizer),
            advantage=facts.advantage,
            metadata={"env": options.environment, "producer": options.producer}
            | {stage.column: stage.record() for stage in stages},
            max_inflight_groups=options.max_inflight_groups,
            min_inflight_groups=options.min_inflight_groups,
            service_patience_s=options.service_patience_s,
            compress=options.compress,
            request_seed=seed if options.seed_requests else None,
            report_every_s=options.report_every_s,
            metrics_file=options.metrics_file,
        ),
        stages,
        schedule=schedule,
        staleness=StalenessBound(facts),
    )


def _schedule(options: GenerateOptions, prompts: str, tokenizer: Tokenizer) -> Schedule:
    """Read the held-out prompts. Raises `Invalid`."""
    held_out = held_out_set(
        prompts,
        options.eval_environment or options.environment,
        tokenizer,
        max_tokens=options.max_tokens,
        temperature=options.eval_temperature,
        samples=options.eval_samples,
        reward_timeout_s=options.reward_timeout_s,
        max_turns=options.max_turns,
    )
    return Schedule(held_out, options.eval_every, adapter=options.adapter, producer=options.producer)


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns, or None where a stop comes first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
