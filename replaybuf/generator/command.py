"""The command `replaybuf generate`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import uvloop
from cyclopts import Parameter

from replaybuf.client import AsyncClient
from replaybuf.errors import Invalid
from replaybuf.generator.curriculum import Supply
from replaybuf.generator.daemon import Daemon, DaemonOptions
from replaybuf.generator.engines import Sampling, Server, open_engine
from replaybuf.generator.environments import check_prompts, load_rewards
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.preflight import (
    check_adapter,
    check_fit,
    check_group_size,
    check_vocabulary,
    max_staleness,
    wait_for_run,
)
from replaybuf.generator.publication import OnPublish
from replaybuf.generator.reward_pool import RewardPool
from replaybuf.generator.scoring import Scorer, Scoring
from replaybuf.generator.tokenizer import Tokenizer

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
    engine_timeout_s: float
    reward_timeout_s: float
    reward_processes: int
    start_timeout_s: float
    model: str | None
    logprobs_mode: str | None
    seed_requests: bool
    engine_api_key: str | None = dataclasses.field(repr=False)
    on_publish: OnPublish
    compress: bool
    metrics_file: Path | None
    report_every_s: float
    token: str | None = dataclasses.field(repr=False)


def generate(
    *,
    url: str,
    run: str,
    engine: Annotated[list[str], Parameter(consume_multiple=True)],
    environment: str,
    prompts: str,
    tokenizer: Path,
    max_tokens: int,
    group_size: int | None = None,
    adapter: str = "",
    temperature: float = 1.0,
    seed: int | None = None,
    shuffle: bool = True,
    producer: str | None = None,
    max_inflight_groups: int = 64,
    engine_timeout_s: float = 300.0,
    reward_timeout_s: float = 30.0,
    reward_processes: int = 0,
    start_timeout_s: float = 300.0,
    model: str | None = None,
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None,
    seed_requests: bool = False,
    engine_api_key: str | None = None,
    on_publish: OnPublish = "in-flight",
    compress: bool = False,
    metrics_file: Path | None = None,
    report_every_s: float = 10.0,
    token: str | None = None,
) -> None:
    """Generate scored groups of rollouts for a run, until its prompts or steps are finished.

    SIGTERM or SIGINT: what is in flight may finish for 2 s, the rest is given back; ends within 4 s.
    Exit code 0 when the run is finished or a signal asked for the end, 1 with a message otherwise.

    Parameters
    ----------
    url
        Address of the service; several servers of one Redis: with commas between.
    run
        Name of the run; waited for where it does not exist yet.
    engine
        Address of an inference server: http://HOST:PORT (vLLM's API) or sglang+http://HOST:PORT (SGLang's own);
        several share the work.
    environment
        What scores completions: exact-match, reasoning-gym, an installed one or your own MODULE:FUNCTION; several with
        weights: NAME:1.0,MODULE:FUNCTION:0.5.
    prompts
        Where prompts come from: FILE.jsonl of {prompt_id?, prompt | messages | prompt_ids, answer?, metadata?},
        FILE.parquet, a datasets folder, reasoning-gym:DATASET, MODULE:FUNCTION, or a curriculum of several, FILE.toml.
    tokenizer
        Model folder with tokenizer.json.
    max_tokens
        Longest completion, in tokens.
    group_size
        Rollouts per prompt; the run's own where it has one.
    temperature
        Sampling temperature.
    seed
        Decides the order of the prompts; the run's seed by default. All generators of a run need the same.
    shuffle
        Shuffle the prompts anew in every epoch; otherwise they keep the order of the file.
    producer
        Name of this generator; host name and process id by default.
    max_inflight_groups
        Groups generated, scored, appended or kept at the same time.
    engine_timeout_s
        Longest time one request may take an engine, in seconds.
    reward_timeout_s
        Longest time scoring one group may take, in seconds.
    reward_processes
        Score in so many processes, for rewards that compute; a late one is killed and started anew. 0: in threads.
    start_timeout_s
        How long to wait for service, run and engines at start, in seconds.
    adapter
        LoRA adapter of the run to generate for: its tickets, its published version. Needed where a run has adapters.
    model
        Name the engines must serve the model by; by default that of the adapter, else the first they serve.
    logprobs_mode
        What the engines were started with; written into every group. Default: raw_logprobs for vLLM,
        processed_logprobs for SGLang.
    seed_requests
        Give every request a seed, derived from seed, prompt index and attempt; written into every group.
    engine_api_key
        Bearer token for the engines; better in the environment than here: REPLAYBUF_GENERATE_ENGINE_API_KEY.
    on_publish
        What new weights do to rollouts in flight. drain: each is of one version, sampled anew where it is not;
        in-flight: they go on, versions in spans; abort-and-resume: aborted ones go on from their tokens, versions in
        spans; abort: aborted ones are sampled anew. Give the trainer the same.
    compress
        Compress token ids and masks by zstd: less network and Redis memory, more work here and in the service.
    metrics_file
        File that gets one JSON line per report.
    report_every_s
        Seconds between two reports.
    token
        Bearer token with the role producer.
    """
    options = GenerateOptions(
        url=url,
        run=run,
        engines=tuple(engine),
        environment=environment,
        prompts=prompts,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        group_size=group_size,
        adapter=adapter,
        temperature=temperature,
        seed=seed,
        shuffle=shuffle,
        producer=producer or f"{socket.gethostname()}-{os.getpid()}",
        max_inflight_groups=max_inflight_groups,
        engine_timeout_s=engine_timeout_s,
        reward_timeout_s=reward_timeout_s,
        reward_processes=reward_processes,
        start_timeout_s=start_timeout_s,
        model=model,
        logprobs_mode=logprobs_mode,
        seed_requests=seed_requests,
        engine_api_key=engine_api_key,
        on_publish=on_publish,
        compress=compress,
        metrics_file=metrics_file,
        report_every_s=report_every_s,
        token=token,
    )
    _check_options(options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_generate(options))
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _check_options(options: GenerateOptions) -> None:
    for name, least in (("max_tokens", 1), ("max_inflight_groups", 1), ("temperature", 0), ("reward_processes", 0)):
        if getattr(options, name) < least:
            value = getattr(options, name)
            raise Invalid(f"{name} is {value}; at least {least} is needed", name=name, value=value, bound=least)
    for name in ("engine_timeout_s", "reward_timeout_s", "start_timeout_s", "report_every_s"):
        if getattr(options, name) <= 0:
            value = getattr(options, name)
            raise Invalid(f"{name} is {value}; more than 0 is needed", name=name, value=value, bound=0)


def _warn_of_raw_logprobs(servers: Sequence[Server], temperature: float) -> None:
    raw = [server.url for server in servers if server.logprobs_mode == "raw_logprobs"]
    if raw and temperature != 1.0:
        logger.warning(
            "temperature is %g, but raw logprobs do not contain it: they are not those of the distribution that was "
            "sampled; start %s with --logprobs-mode processed_logprobs",
            temperature,
            ", ".join(raw),
        )


async def _generate(options: GenerateOptions) -> None:
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
            daemon = await _unless_stopped(stop, _prepared(options, client, engine, stack))
            if daemon is not None:
                await daemon.run(stop)
    finally:
        await engine.aclose()


async def _prepared(options: GenerateOptions, client: AsyncClient, engine: Fleet, stack: AsyncExitStack) -> Daemon:
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
    check_fit(facts, read, group_size=group_size, max_tokens=options.max_tokens, max_model_len=engine.max_model_len)
    seed = facts.seed if options.seed is None else options.seed
    logger.info("generating: %d prompts, groups of %d, %d engines", len(read), group_size, len(options.engines))
    scoring: Scoring = Scorer(rewards, timeout_s=options.reward_timeout_s)
    if options.reward_processes:
        pool = RewardPool(options.environment, processes=options.reward_processes, timeout_s=options.reward_timeout_s)
        scoring = await stack.enter_async_context(pool)
    return Daemon(
        client,
        engine,
        scoring,
        supply.ordered(seed=seed, shuffle=options.shuffle, check=lambda prompt: check_prompts(rewards, [prompt])),
        tokenizer,
        DaemonOptions(
            producer=options.producer,
            adapter=options.adapter,
            sampling=Sampling(
                n=group_size,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                stop_token_ids=tuple(sorted(tokenizer.eos_token_ids)),
            ),
            advantage=facts.advantage,
            metadata={"env": options.environment, "producer": options.producer},
            max_inflight_groups=options.max_inflight_groups,
            compress=options.compress,
            request_seed=seed if options.seed_requests else None,
            report_every_s=options.report_every_s,
            metrics_file=options.metrics_file,
        ),
    )


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


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Unpack the error that task groups wrapped; of several the first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
