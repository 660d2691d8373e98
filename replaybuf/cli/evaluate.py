"""The command `replaybuf eval`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from replaybuf.cli.event_loop import run_async
from replaybuf.client.client import AsyncClient
from replaybuf.generator.evaluation import open_held_out
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.options import EvaluateOptions, default_producer
from replaybuf.generator.preflight import check_tokenizer
from replaybuf.launch.view import work_bar
from replaybuf.wire.answer.evaluations import EvaluationRequest
from replaybuf.wire.text.model_tokenizer import Tokenizer

RETRY_FOR_S = 60.0


def evaluate(
    run: Annotated[str | None, Parameter(help="Name of the run that the result belongs to; needs --url.")] = None,
    /,
    *,
    options: Annotated[EvaluateOptions, Parameter(name="*")],
) -> None:
    """Sample and score held-out prompts with the current weights of the engines, and print the result.

    The completions are not used for training. With RUN and --url, the service records the result for the version.
    """
    del run  # also the value of --run, see `replaybuf.cli.configuration`
    options.check()
    result = run_async(_evaluate(options))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(_table(result))


async def _evaluate(options: EvaluateOptions) -> EvaluationRequest:
    tokenizer = Tokenizer(options.tokenizer)
    held_out = open_held_out(
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
    servers = options.open_engines()
    fleet = Fleet(servers)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.aclose)
        await fleet.prepare(options.start_timeout_s)
        await check_tokenizer(servers, tokenizer, held_out.prompts)
        with work_bar(f"evaluating {held_out.name}") as done:
            result = await held_out.report(fleet, adapter=options.adapter, producer=default_producer(), done=done)
        if options.url is None or options.run is None:
            return result
        client = AsyncClient(options.url, options.run, token=options.token, retry_for_s=RETRY_FOR_S)
        return await (await stack.enter_async_context(client)).record_evaluation(result)


def _table(result: EvaluationRequest) -> Table:
    table = Table(title=f"evaluation {result.name}", title_justify="left", show_header=False)
    error = "" if result.standard_error is None else f" ± {result.standard_error:.4f}"
    table.add_row("policy version", ", ".join(str(version) for version in result.versions))
    table.add_row("mean reward", f"{result.reward_mean:.4f}{error}")
    for part, mean in result.parts.items():
        table.add_row(f"  {part}", f"{mean:.4f}")
    sampling = f"{result.samples} per prompt at temperature {result.temperature:g}"
    table.add_row("completions", f"{result.rollouts}, {sampling}")
    table.add_row("prompts failed", str(result.failed))
    table.add_row("seconds", f"{result.seconds or 0.0:.1f}")
    return table
