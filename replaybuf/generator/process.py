"""`replaybuf generate` as a process: build the daemon from its options, handle signals, serve metrics."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias, TypeVar

from replaybuf.client.client import AsyncClient
from replaybuf.errors import Invalid, counted
from replaybuf.generator.daemon import Daemon, Follower
from replaybuf.generator.daemon_options import DaemonOptions
from replaybuf.generator.engines import Sampling, Server
from replaybuf.generator.environments import Reward, check_prompts, load_rewards, multi_turn
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.reward_pool import RewardPool
from replaybuf.generator.environments.scoring import Scorer, Scoring
from replaybuf.generator.evaluation import Schedule, open_held_out
from replaybuf.generator.failures import report_failure
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.metrics import exposition, serve_metrics
from replaybuf.generator.options import GenerateOptions
from replaybuf.generator.preflight import (
    check_adapter,
    check_fit,
    check_group_size,
    check_length_penalty,
    check_tokenizer,
    check_vocabulary,
    wait_for_run,
    warn_of_overlap,
)
from replaybuf.generator.prompts.curriculum import Supply
from replaybuf.generator.stage.logprobs import open_stages
from replaybuf.generator.staleness import StalenessBound, max_staleness
from replaybuf.logs import announce
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.text.model_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

Reread: TypeAlias = Callable[[], GenerateOptions]
"""Parses command line, environment and configuration file again. Raises `Invalid`."""


async def run_generator(options: GenerateOptions, reread: Reread | None = None) -> None:
    """Generate until the run is finished or a signal comes; with `reread`, SIGHUP reads the options again.

    The daemon sends heartbeats, and its failures with them. A failure before it starts is reported here.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    daemon: Daemon | None = None
    async with _early_failure_reported(options, lambda: daemon is None), AsyncExitStack() as stack:
        servers = options.open_engines(options.logprobs_mode)
        _warn_of_raw_logprobs(servers, options.temperature)
        fleet = Fleet(servers, on_publish=options.on_publish)
        stack.push_async_callback(fleet.aclose)
        client = await stack.enter_async_context(AsyncClient(options.url, options.run, token=options.token))
        if options.metrics_address is not None:
            serving = serve_metrics(*options.metrics_address, lambda: exposition(options.run, daemon))
            announce("metrics at %s/metrics", await stack.enter_async_context(serving))
        daemon = await _unless_stopped(stop, _prepare(options, client, fleet, servers, stack))
        if daemon is not None:
            async with _reload_on_hangup(options, daemon, servers, reread):
                await daemon.run(stop)


@contextlib.asynccontextmanager
async def _early_failure_reported(options: GenerateOptions, early: Callable[[], bool]) -> AsyncIterator[None]:
    try:
        yield
    except Exception as error:
        if early():
            await report_failure(options.url, options.run, options.token, options.producer, error)
        raise


def _warn_of_raw_logprobs(servers: Sequence[Server], temperature: float) -> None:
    raw = [server.url for server in servers if server.logprobs_mode == "raw_logprobs"]
    if raw and temperature != 1.0:
        logger.warning(
            "temperature is %g, but raw logprobs do not contain it: they are not those of the sampled distribution; "
            "start %s with --logprobs-mode processed_logprobs",
            temperature,
            ", ".join(raw),
        )


async def _prepare(
    options: GenerateOptions, client: AsyncClient, fleet: Fleet, servers: Sequence[Server], stack: AsyncExitStack
) -> Daemon:
    """Build the daemon after all checks; `stack` closes what it uses."""
    tokenizer = Tokenizer(options.tokenizer)
    supply = Supply(options.prompts, tokenizer, options.prompt_filter)
    prompts = supply.loaded
    rewards = load_rewards(options.environment)
    check_prompts(rewards, prompts)
    facts = await wait_for_run(client, options.start_timeout_s)
    check_adapter(options.adapter, facts)
    check_vocabulary(facts, tokenizer)
    group_size = check_group_size(options.group_size, facts)
    length_penalty = options.open_length_penalty()
    check_length_penalty(length_penalty, facts)
    fleet.max_staleness = max_staleness(facts)
    await fleet.prepare(options.start_timeout_s)
    await check_tokenizer(servers, tokenizer, prompts)
    stages = await open_stages(
        options.logprobs,
        stack,
        policy=servers,
        timeout_s=options.engine_timeout_s,
        start_timeout_s=options.start_timeout_s,
        api_key=options.engine_api_key,
    )
    longest = {"the engine's max_model_len": fleet.max_model_len}
    longest |= {f"the maximum length for {stage.column}": stage.max_tokens for stage in stages}
    check_fit(facts, prompts, group_size=group_size, max_tokens=options.max_tokens, longest=longest)
    scorer = await _open_scorer(options, rewards, tokenizer, stack)
    followers: list[Follower] = [StalenessBound(facts)]
    if options.eval_prompts is not None:
        schedule = _open_schedule(options, options.eval_prompts, tokenizer, facts, fleet)
        warn_of_overlap(schedule.held_out.prompts, prompts)
        followers.append(schedule)
    seed = facts.seed if options.seed is None else options.seed
    loaded, engines = counted(len(prompts), "prompt"), counted(len(servers), "engine")
    logger.info("generating: %s, groups of %d, %s", loaded, group_size, engines)
    sampling = Sampling(
        n=group_size,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        stop_token_ids=tokenizer.stop_token_ids,
    )
    daemon = Daemon(
        client,
        fleet,
        scorer,
        supply.ordered(seed=seed, shuffle=options.shuffle, check=lambda prompt: check_prompts(rewards, [prompt])),
        tokenizer,
        DaemonOptions(
            producer=options.producer,
            adapter=options.adapter,
            sampling=sampling,
            advantage=facts.advantage,
            length_penalty=length_penalty,
            metadata={"env": options.environment, "producer": options.producer}
            | ({} if length_penalty is None else {"length_penalty": dataclasses.asdict(length_penalty)})
            | {stage.column: stage.record() for stage in stages},
            max_inflight_groups=options.max_inflight_groups,
            min_inflight_groups=options.min_inflight_groups,
            service_patience_s=options.service_patience_s,
            compress=options.compress,
            rollouts_per_request=options.rollouts_per_request,
            min_group_size=facts.min_group_size,
            request_seed=seed if options.seed_requests else None,
            report_every_s=options.report_every_s,
            metrics_file=options.metrics_file,
        ),
        stages,
        followers,
    )
    daemon.progress.prompts_dropped.update(supply.dropped)
    return daemon


async def _open_scorer(
    options: GenerateOptions, rewards: Sequence[Reward], tokenizer: Tokenizer, stack: AsyncExitStack
) -> Scoring | Episodes:
    played = multi_turn(rewards)
    if played is not None and not options.reward_processes:
        return Episodes(played, tokenizer, max_turns=options.max_turns, timeout_s=options.reward_timeout_s)
    scorer = Scorer(rewards, timeout_s=options.reward_timeout_s)  # raises here, not only in the processes
    if not options.reward_processes:
        return scorer
    pool = RewardPool(options.environment, processes=options.reward_processes, timeout_s=options.reward_timeout_s)
    return await stack.enter_async_context(pool)


def _open_schedule(
    options: GenerateOptions, eval_prompts: str, tokenizer: Tokenizer, facts: RunFacts, fleet: Fleet
) -> Schedule:
    evaluation = options.eval_options
    held_out = open_held_out(
        eval_prompts,
        evaluation.environment or options.environment,
        tokenizer,
        max_tokens=options.max_tokens,
        temperature=evaluation.temperature,
        samples=evaluation.samples,
        reward_timeout_s=options.reward_timeout_s,
        max_turns=options.max_turns,
    )
    check_fit(
        facts,
        held_out.prompts,
        group_size=evaluation.samples,
        max_tokens=options.max_tokens,
        longest={"the engine's max_model_len": fleet.max_model_len},
    )
    return Schedule(held_out, evaluation.every_versions, adapter=options.adapter, producer=options.producer)


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None where a stop comes first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


@contextlib.asynccontextmanager
async def _reload_on_hangup(
    options: GenerateOptions, daemon: Daemon, servers: Sequence[Server], reread: Reread | None
) -> AsyncIterator[None]:
    """Read the options again at every SIGHUP. Without `reread` the signal ends the process, as by default."""
    if reread is None:
        yield
        return
    hangup = asyncio.Event()

    async def follow_hangups() -> None:
        current = options
        while True:
            await hangup.wait()
            hangup.clear()
            current = await _reload(current, daemon, servers, reread)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    following = asyncio.create_task(follow_hangups())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def _reload(
    current: GenerateOptions, daemon: Daemon, servers: Sequence[Server], reread: Reread
) -> GenerateOptions:
    """Apply changed options and return the options now in use. One invalid change keeps all options as they are."""
    try:
        options = reread()
        options.check()
        changed = current.live_changes(options)
        await daemon.reconfigure(**changed)
    except Invalid as error:
        logger.error("the options do not change: %s", error.detail)
        return current
    if "temperature" in changed:
        _warn_of_raw_logprobs(servers, options.temperature)
    logger.info("options read again; changed: %s", ", ".join(f"{k}={v}" for k, v in changed.items()) or "nothing")
    return options
