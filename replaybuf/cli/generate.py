"""The command `replaybuf generate`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import uvloop
from cyclopts import Parameter
from cyclopts.types import Port

from replaybuf.errors import Invalid, first_error
from replaybuf.generator.fleet.concurrency import Bounds
from replaybuf.generator.fleet.publication import OnPublish
from replaybuf.generator.inflight import PATIENCE_S
from replaybuf.generator.logprobs import LogprobOptions
from replaybuf.generator.preflight import check_least
from replaybuf.generator.process import GenerateOptions, run_generator

_LEAST = {
    "max_tokens": 1,
    "max_inflight_groups": 1,
    "temperature": 0,
    "reward_processes": 0,
    "max_turns": 1,
    "eval_every": 1,
    "eval_samples": 1,
    "eval_temperature": 0,
}


def generate(
    *,
    url: str,
    run: str,
    engine: Annotated[list[str], Parameter(consume_multiple=True, negative="")],
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
    min_inflight_groups: int = 1,
    engine_timeout_s: float = 300.0,
    reward_timeout_s: float = 30.0,
    reward_processes: int = 0,
    max_turns: int = 8,
    start_timeout_s: float = 300.0,
    service_patience_s: float = PATIENCE_S,
    model: str | None = None,
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None,
    seed_requests: bool = False,
    engine_api_key: str | None = None,
    on_publish: OnPublish = "in-flight",
    eval_prompts: str | None = None,
    eval_every: int = 10,
    eval_environment: str | None = None,
    eval_samples: int = 1,
    eval_temperature: float = 0.0,
    compress: bool = False,
    metrics_file: Path | None = None,
    report_every_s: float = 10.0,
    metrics_host: str = "127.0.0.1",
    metrics_port: Port | None = None,
    logprobs: Annotated[LogprobOptions | None, Parameter(name="*")] = None,
    token: str | None = None,
    reread: Annotated[Callable[[], dict[str, Any]] | None, Parameter(parse=False)] = None,
) -> None:
    """Generate scored groups of rollouts for a run, until its prompts or steps are finished.

    SIGTERM or SIGINT: what is in flight may finish for 2 s, the rest is given back; ends within 4 s.
    Exit code 0 when the run is finished or a signal asked for the end, 1 with a message otherwise.
    SIGHUP: the file of --config is read again; max_inflight_groups, min_inflight_groups, temperature and report_every_s
    count from the next ticket on, a change of anything else is refused and said in the log.

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
        What scores completions: exact-match, reasoning-gym, verifiers, an installed one or your own MODULE:FUNCTION;
        several with weights: NAME:1.0,MODULE:FUNCTION:0.5.
    prompts
        Where prompts come from: FILE.jsonl of {prompt_id?, prompt | messages | prompt_ids, answer?, metadata?},
        FILE.parquet, a datasets folder, reasoning-gym:DATASET, verifiers:TASKSET, MODULE:FUNCTION, or a curriculum of
        several, FILE.toml.
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
    min_inflight_groups
        So many are generated at the same time even where rollouts queue at the engines; up to the maximum where none
        do. The same number as the maximum: the engines are not asked.
    engine_timeout_s
        Longest time one request may take an engine, in seconds.
    reward_timeout_s
        Longest time scoring one group may take, in seconds.
    reward_processes
        Score in so many processes, for rewards that compute; a late one is killed and started anew. 0: in threads.
    max_turns
        Turns of a rollout at most, in an environment that answers turns.
    start_timeout_s
        How long to wait for service, run and engines at start, in seconds.
    service_patience_s
        How long groups are kept and sent again while the service or its Redis is away, in seconds; then it ends with
        exit code 1 and they are lost.
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
    eval_prompts
        Held-out prompts to evaluate while generating, as for prompts; finite. None by default.
    eval_every
        Evaluate once in so many versions, and at the start.
    eval_environment
        What scores them; by default environment.
    eval_samples
        Completions per held-out prompt.
    eval_temperature
        Their sampling temperature; 0 = greedy.
    compress
        Compress token ids and masks by zstd: less network and Redis memory, more work here and in the service.
    metrics_file
        File that gets one JSON line per report.
    report_every_s
        Seconds between two reports.
    metrics_host
        Address that metrics_port is on.
    metrics_port
        Port of GET /metrics and GET /healthz; 0 takes a free one, which is printed. None by default.
    logprobs
        Whose logprobs groups carry beside those of the policy.
    token
        Bearer token with the role producer.
    """
    options = _checked(locals())
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_generator(options, None if reread is None else lambda: _checked(reread())))
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def _checked(arguments: Mapping[str, Any]) -> GenerateOptions:
    """Make options of the arguments of `generate`. Raises `Invalid` where one is out of its bounds."""
    given = {name: value for name, value in arguments.items() if name not in ("engine", "reread")}
    given["producer"] = given["producer"] or f"{socket.gethostname()}-{os.getpid()}"
    given["logprobs"] = given["logprobs"] or LogprobOptions()
    options = GenerateOptions(engines=tuple(arguments["engine"]), **given)
    options.logprobs.check()
    for name, least in _LEAST.items():
        check_least(name, getattr(options, name), least)
    for name in ("engine_timeout_s", "reward_timeout_s", "start_timeout_s", "report_every_s", "service_patience_s"):
        if getattr(options, name) <= 0:
            value = getattr(options, name)
            raise Invalid(f"{name} is {value}; more than 0 is needed", name=name, value=value, bound=0)
    Bounds(options.min_inflight_groups, options.max_inflight_groups)
    return options
