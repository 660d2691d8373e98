"""Options of `replaybuf generate` and `replaybuf eval`. The docstring of each field is its help text."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from replaybuf.errors import Invalid
from replaybuf.generator.engines import Server, open_engine
from replaybuf.generator.environments.length_penalty import LengthPenalty, LengthPenaltyOptions
from replaybuf.generator.fleet import OnPublish
from replaybuf.generator.fleet.concurrency import Bounds
from replaybuf.generator.inflight import PATIENCE_S
from replaybuf.generator.prompts.filters import PromptFilterOptions
from replaybuf.generator.stage.logprobs import LogprobOptions
from replaybuf.option_types import ListenAddress, OptionGroup, Positive, about, group_option

LIVE = ("max_inflight_groups", "min_inflight_groups", "temperature", "report_every_s")
"""Options that SIGHUP changes in a running generator."""


def default_producer() -> str:
    """Return a name for this process: host name and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


@group_option
class EvaluationOptions(OptionGroup, frozen=True, kw_only=True):
    """Evaluations of --eval-prompts, such as {"samples": 4}."""

    every_versions: Annotated[
        Positive, about("Weight versions between two evaluations; the first is at the start.")
    ] = 10
    environment: Annotated[str | None, about("Environment that scores the prompts. Default: --environment.")] = None
    samples: Annotated[Positive, about("Completions per held-out prompt.")] = 1
    temperature: Annotated[float, about("Sampling temperature; 0 = greedy.", ge=0)] = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Engines, prompts and scoring: the options that both commands have."""

    engines: Annotated[tuple[str, ...], Parameter(name="engine", consume_multiple=True, negative="")]
    """Address of an inference server: http://HOST:PORT (vLLM's API) or sglang+http://HOST:PORT (SGLang's API); give
    several to share the work."""
    environment: str
    """Environment that scores completions: exact-match, reasoning-gym, verifiers, the name of an installed environment,
    or MODULE:FUNCTION. To mix several, give weights: NAME:1.0,MODULE:FUNCTION:0.5."""
    prompts: str
    """Source of prompts: FILE.jsonl, FILE.parquet, a datasets folder, reasoning-gym:DATASET, verifiers:TASKSET,
    MODULE:FUNCTION, or FILE.toml (a curriculum of several sources). One line of FILE.jsonl: {prompt_id?, prompt |
    messages | prompt_ids, answer?, metadata?}."""
    tokenizer: Path
    """Model folder with tokenizer.json."""
    max_tokens: PositiveInt
    """Maximum length of a completion, in tokens."""
    max_turns: PositiveInt = 8
    """Maximum number of turns of a rollout, in an environment with turns."""
    engine_timeout_s: PositiveFloat = 300.0
    """Maximum time of one request to an engine, in seconds."""
    reward_timeout_s: PositiveFloat = 30.0
    """Maximum time to score the completions of one prompt, in seconds. In an environment with turns the limit
    applies to each call."""
    start_timeout_s: NonNegativeFloat = 300.0
    """Time to wait at start for the service, the run and the engines, in seconds."""
    model: str | None = None
    """Name of the served model; default: the adapter's name if one is set, else the first model of each engine."""
    adapter: Annotated[str, Parameter(show_default=False)] = ""
    """Name of the LoRA adapter to sample from. Required if the run has adapters."""
    engine_api_key: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token for the engines. Set it as REPLAYBUF_GENERATE_ENGINE_API_KEY or REPLAYBUF_EVAL_ENGINE_API_KEY,
    because other users of the machine can see command lines."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token of the service, with the role producer."""

    def open_engines(self, logprobs_mode: str | None = None) -> list[Server]:
        """Return the clients of all engines. Raises `Invalid` for an address that is not one."""
        return [
            open_engine(
                address,
                timeout_s=self.engine_timeout_s,
                model=self.model or self.adapter or None,
                logprobs_mode=logprobs_mode,
                api_key=self.engine_api_key,
            )
            for address in self.engines
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Options of `replaybuf generate`."""

    url: str
    """Address of the service; separate several servers of one Redis by commas."""
    run: Annotated[str, Parameter(show=False)]
    """Name of the run; the generator waits until the run exists."""
    group_size: PositiveInt | None = None
    """Number of rollouts per prompt; default: group_size of the run."""
    rollouts_per_request: PositiveInt | None = None
    """Maximum number of rollouts in one request to an engine. Several requests spread a group over the engines, and a
    failed request loses only its own rollouts (see min_group_size of the run). Default: the whole group."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature."""
    seed: int | None = None
    """Seed of the order of the prompts; default: seed of the run. All generators of a run need the same seed."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch. With --no-shuffle they keep the order of the file."""
    producer: Annotated[str, Parameter(show_default=False)] = dataclasses.field(default_factory=default_producer)
    """Name of this generator in tickets and groups; default: host name and process id."""
    max_inflight_groups: PositiveInt = 64
    """Maximum number of groups in flight, from ticket to append."""
    min_inflight_groups: PositiveInt = 1
    """Minimum number of groups in flight. The generator reduces the number down to this while rollouts queue at the
    engines. If it equals the maximum, the generator ignores the engines' queues."""
    service_patience_s: PositiveFloat = PATIENCE_S
    """Time to keep groups and retry while the service or its Redis is unreachable, in seconds. After that the
    generator ends with exit code 1, and its groups are lost."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """Logprobs mode set at the start of the engines; recorded in every group. Default: raw_logprobs for vLLM,
    processed_logprobs for SGLang."""
    seed_requests: bool = False
    """Send a seed with every request and record it in every group. It is derived from seed, prompt index and
    attempt."""
    on_publish: OnPublish = "in-flight"
    """Rollouts in flight when new weights are loaded. drain: they finish with the old weights; a rollout with two
    versions is sampled again. in-flight: they continue with the new weights. abort-and-resume: they are aborted and
    continue from their tokens. abort: they are aborted and sampled again. Give the trainer the same value."""
    reward_processes: NonNegativeInt = 0
    """Number of processes that score completions, for rewards that need much CPU time. A process that exceeds
    reward_timeout_s is killed and restarted. 0: score in threads."""
    length_penalty: LengthPenaltyOptions | None = None
    eval_prompts: str | None = None
    """Source of held-out prompts to evaluate during generation, in the same form as prompts; it must be finite.
    Default: no evaluation."""
    eval_options: EvaluationOptions = dataclasses.field(default_factory=EvaluationOptions)
    compress: bool = False
    """Compress token ids and masks with zstd: less network traffic and Redis memory, more CPU time."""
    metrics_file: Path | None = None
    """File to append one JSON line per report to."""
    report_every_s: PositiveFloat = 10.0
    """Time between two reports, in seconds."""
    metrics_address: ListenAddress | None = None
    """Address of GET /metrics and GET /healthz: HOST:PORT, or PORT on 127.0.0.1; port 0 takes a free one and prints it.
    Default: no metrics."""
    logprobs: Annotated[LogprobOptions, Parameter(name="*")] = dataclasses.field(default_factory=LogprobOptions)
    """Additional logprobs of every group."""
    prompt_filter: PromptFilterOptions = dataclasses.field(default_factory=PromptFilterOptions)

    def check(self) -> None:
        """Raise `Invalid` where options contradict each other."""
        self.logprobs.check()
        self.open_length_penalty()
        Bounds(self.min_inflight_groups, self.max_inflight_groups)

    def open_length_penalty(self) -> LengthPenalty | None:
        """Return the penalty of `length_penalty`. Raises `Invalid` for lengths that `max_tokens` contradicts."""
        return None if self.length_penalty is None else self.length_penalty.penalty(self.max_tokens)

    def live_changes(self, options: GenerateOptions) -> dict[str, Any]:
        """Return the `options` that differ from these, by name. Raises `Invalid` where one of them is not in `LIVE`."""
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(options, field.name)
            if value == getattr(self, field.name):
                continue
            if field.name not in LIVE:
                shown = repr(value) if field.repr else "another value"
                detail = f"{field.name} is now {shown}; it is read only at the start. SIGHUP changes: {', '.join(LIVE)}"
                raise Invalid(detail, name=field.name, value=shown, bound=LIVE)
            changed[field.name] = value
        return changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SamplingOptions):
    """Options of `replaybuf eval`."""

    samples: PositiveInt = 1
    """Number of completions per prompt."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 = greedy."""
    max_inflight_prompts: PositiveInt = 32
    """Maximum number of prompts sampled or scored at the same time."""
    name: str | None = None
    """Name of the held-out set in the recorded result; default: the name of its file."""
    json: bool = False
    """Print JSON instead of a table."""
    url: str | None = None
    """Address of the service that records the result of a RUN."""
    run: Annotated[str | None, Parameter(show=False)] = None
    """Name of the run that the result belongs to; needs url."""

    def check(self) -> None:
        """Raise `Invalid` where only one of `url` and `run` is set."""
        if (self.url is None) != (self.run is None):
            missing = "url" if self.url is None else "run"
            raise Invalid(f"{missing} is missing: url and run belong together", name=missing)
