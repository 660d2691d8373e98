"""The command `replaybuf eval`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from replaybuf.cli.event_loop import run_async
from replaybuf.cli.service import print_table
from replaybuf.client.client import AsyncClient
from replaybuf.errors import Invalid
from replaybuf.generator.checkpoint_scores import (
    SCORES_FILE,
    Checkpoint,
    CheckpointScore,
    ScoreFile,
    open_checkpoints,
    score_checkpoints,
    setting_of,
)
from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.evaluation import HeldOut, open_held_out
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.options import EvaluateOptions, default_producer
from replaybuf.generator.preflight import check_tokenizer
from replaybuf.launch.view import work_bar
from replaybuf.wire.answer.evaluations import EvaluationRequest
from replaybuf.wire.text.model_tokenizer import Tokenizer

RETRY_FOR_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints to score, in place of the present weights of the engines."""

    checkpoints: Path | None = None
    """Folder of a trainer's checkpoints. Each is loaded into the one engine and scored, the newest last; the engine
    must serve nobody else, and read the folder."""
    scores: Path | None = None
    """File of the scores; by default scores.json in the folder of the checkpoints. A checkpoint in it is not scored
    again."""
    again: Annotated[bool, Parameter(negative="")] = False
    """Score all checkpoints again."""

    def check(self, options: EvaluateOptions) -> None:
        """Raise `Invalid` for options that need `checkpoints`, and for engines that cannot load them."""
        if self.checkpoints is None:
            for name, value in (("scores", self.scores), ("again", self.again)):
                if value:
                    raise Invalid(f"--{name} needs --checkpoints DIR", name=name, value=str(value))
            return
        if len(options.engines) != 1:
            detail = f"--checkpoints needs exactly one --engine, which loads them in turn; there are {options.engines}"
            raise Invalid(detail, name="engine", value=list(options.engines), bound=1)
        if options.adapter:
            detail = f"--adapter is {options.adapter!r}; --checkpoints scores whole models, without adapters"
            raise Invalid(detail, name="adapter", value=options.adapter, bound="")


def evaluate(
    run: Annotated[str | None, Parameter(help="Name of the run that the result belongs to; needs --url.")] = None,
    /,
    *,
    options: Annotated[EvaluateOptions, Parameter(name="*")],
    of_checkpoints: Annotated[CheckpointOptions, Parameter(name="*")] = CheckpointOptions(),
) -> None:
    """Sample and score held-out prompts with the current weights of the engines, and print the result.

    The completions are not used for training. With RUN and --url, the service records the result for the version.
    With --checkpoints, each checkpoint of a folder is scored by one engine.
    """
    del run  # also the value of --run, see `replaybuf.cli.configuration`
    options.check()
    of_checkpoints.check(options)
    if of_checkpoints.checkpoints is None:
        _print(run_async(_evaluate(options)), options)
        return
    checkpoints = open_checkpoints(of_checkpoints.checkpoints, options.tokenizer)
    scores = ScoreFile(of_checkpoints.scores or of_checkpoints.checkpoints / SCORES_FILE)
    scored = run_async(_score(options, checkpoints, scores, again=of_checkpoints.again))
    if options.json:
        print(
            msgspec.json.format(
                msgspec.json.encode({"checkpoints": [_entry(score, new=new) for score, new in scored]})
            ).decode()
        )
    else:
        print_table(
            ("checkpoint", ">step", ">version", ">mean reward", ">completions", ">failed", ">seconds", "scored"),
            [_row(score, new=new) for score, new in scored],
            title=f"evaluation {options.name or Path(options.prompts).stem} of {of_checkpoints.checkpoints}",
        )


async def _evaluate(options: EvaluateOptions) -> EvaluationRequest:
    tokenizer = Tokenizer(options.tokenizer)
    held_out = _open_held_out(options, tokenizer)
    servers = options.open_engines()
    fleet = Fleet(servers)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.aclose)
        await fleet.prepare(options.start_timeout_s)
        await check_tokenizer(servers, tokenizer, held_out.prompts)
        with work_bar(f"evaluating {held_out.name}") as done:
            result = await held_out.report(fleet, adapter=options.adapter, producer=default_producer(), done=done)
        async with _service(options) as client:
            try:
                return result if client is None else await client.record_evaluation(result)
            except Invalid:
                _print(result, options)  # it took minutes
                raise


def _print(result: EvaluationRequest, options: EvaluateOptions) -> None:
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(_table(result))


async def _score(
    options: EvaluateOptions, checkpoints: Sequence[Checkpoint], scores: ScoreFile, *, again: bool
) -> list[tuple[CheckpointScore, bool]]:
    tokenizer = Tokenizer(options.tokenizer)
    held_out = _open_held_out(options, tokenizer)
    engine = _loading_engine(options)
    # The fleet waits for the engine's start. Scores are sampled without it: it would take an older version for a loss.
    fleet = Fleet([engine])
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.aclose)
        await fleet.prepare(options.start_timeout_s)
        await check_tokenizer([engine], tokenizer, held_out.prompts)
        with work_bar(f"scoring {len(checkpoints)} checkpoints") as done:
            scored = await score_checkpoints(
                checkpoints,
                held_out,
                engine,
                scores,
                setting=setting_of(held_out, options.environment, options.max_turns),
                producer=default_producer(),
                again=again,
                done=lambda place, count, total: done(place * total + count, len(checkpoints) * total),
            )
        async with _service(options) as client:
            for score, new in scored:
                if new and client is not None:
                    await client.record_evaluation(score.result)
    return scored


def _open_held_out(options: EvaluateOptions, tokenizer: Tokenizer) -> HeldOut:
    return open_held_out(
        options.prompts,
        options.environment,
        tokenizer,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        samples=options.samples,
        reward_timeout_s=options.reward_timeout_s,
        max_turns=options.max_turns,
        name=options.name,
        max_inflight_prompts=options.max_inflight_prompts,
    )


def _loading_engine(options: EvaluateOptions) -> VllmEngine:
    """Return the one engine. Raises `Invalid` for an API that cannot load a folder here."""
    engine = options.open_engines()[0]
    if not isinstance(engine, VllmEngine):
        detail = f"--engine is {options.engines[0]}; --checkpoints loads weights by vLLM's API: give http://HOST:PORT"
        raise Invalid(detail, name="engine", value=options.engines[0], bound="http://HOST:PORT")
    return engine


@asynccontextmanager
async def _service(options: EvaluateOptions) -> AsyncIterator[AsyncClient | None]:
    """Yield a client of the run that records results; None without one."""
    if options.url is None or options.run is None:
        yield None
        return
    async with AsyncClient(options.url, options.run, token=options.token, retry_for_s=RETRY_FOR_S) as client:
        yield client


def _reward(result: EvaluationRequest) -> str:
    error = "" if result.standard_error is None else f" ± {result.standard_error:.4f}"
    return f"{result.reward_mean:.4f}{error}"


def _row(score: CheckpointScore, *, new: bool) -> tuple[object, ...]:
    result = score.result
    return (
        score.checkpoint,
        score.step,
        result.version,
        _reward(result),
        result.rollouts,
        result.failed,
        f"{result.seconds or 0.0:.1f}",
        "now" if new else "before",
    )


def _entry(score: CheckpointScore, *, new: bool) -> dict[str, Any]:
    of_checkpoint = {"checkpoint": score.checkpoint, "step": score.step, "trained_run": score.run, "new": new}
    return {**of_checkpoint, **msgspec.to_builtins(score.result)}


def _table(result: EvaluationRequest) -> Table:
    table = Table(title=f"evaluation {result.name}", title_justify="left", show_header=False)
    table.add_row("policy version", ", ".join(str(version) for version in result.versions))
    table.add_row("mean reward", _reward(result))
    for part, mean in result.parts.items():
        table.add_row(f"  {part}", f"{mean:.4f}")
    sampling = f"{result.samples} per prompt at temperature {result.temperature:g}"
    table.add_row("completions", f"{result.rollouts}, {sampling}")
    table.add_row("prompts failed", str(result.failed))
    table.add_row("seconds", f"{result.seconds or 0.0:.1f}")
    return table
