"""The command `replaybuf eval`."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvloop
from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveFloat
from rich.console import Console
from rich.table import Table

from replaybuf.client.client import AsyncClient
from replaybuf.errors import Invalid
from replaybuf.generator.engines import open_engine
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.preflight import check_least, check_tokenizer, held_out_set
from replaybuf.wire.evaluations import EvaluationRequest
from replaybuf.wire.tokenizer import Tokenizer

RETRY_FOR_S = 60.0


def evaluate_command(
    *,
    engine: Annotated[list[str], Parameter(consume_multiple=True, negative="")],
    environment: str,
    prompts: str,
    tokenizer: Path,
    max_tokens: int,
    samples: int = 1,
    temperature: float = 0.0,
    max_inflight_prompts: int = 32,
    engine_timeout_s: PositiveFloat = 300.0,
    reward_timeout_s: PositiveFloat = 30.0,
    max_turns: int = 8,
    start_timeout_s: NonNegativeFloat = 300.0,
    model: str | None = None,
    engine_api_key: str | None = None,
    name: str | None = None,
    json: bool = False,
    url: str | None = None,
    run: str | None = None,
    adapter: str = "",
    token: str | None = None,
) -> None:
    """Score completions of held-out prompts by the engines as they are, and print what they come to.

    Nothing becomes a training group. With url and run the result is kept there by version.

    Parameters
    ----------
    engine
        Address of an inference server, as for generate; several share the work.
    environment
        What scores completions, as for generate.
    prompts
        The held-out set, as for generate; finite.
    tokenizer
        Model folder with tokenizer.json.
    max_tokens
        Longest completion, in tokens.
    samples
        Completions per prompt.
    temperature
        Sampling temperature; 0 = greedy.
    max_inflight_prompts
        Prompts in engines and rewards at the same time.
    engine_timeout_s
        Longest time one request may take an engine, in seconds.
    reward_timeout_s
        Longest time scoring one prompt's completions may take, in seconds; each call of an environment of turns.
    max_turns
        Turns of a rollout at most, in an environment that answers turns.
    start_timeout_s
        How long to wait for the engines, in seconds.
    model
        Name the engines must serve the model by; by default that of the adapter, else the first they serve.
    engine_api_key
        Bearer token for the engines; better in the environment: REPLAYBUF_EVAL_ENGINE_API_KEY.
    name
        Name of the set, under which results are kept; the file's own by default.
    json
        Print JSON instead of a table.
    url
        Address of the service that keeps the result.
    run
        Run that the result belongs to.
    adapter
        LoRA adapter of the run that is evaluated.
    token
        Bearer token with the role producer.
    """
    if (url is None) != (run is None):
        raise Invalid("url and run go together; one of them is missing", name="url" if url is None else "run")
    for option, value in {
        "max_tokens": max_tokens,
        "samples": samples,
        "max_inflight_prompts": max_inflight_prompts,
        "max_turns": max_turns,
    }.items():
        check_least(option, value, 1)
    check_least("temperature", temperature, 0)
    model_folder = Tokenizer(tokenizer)
    held_out = held_out_set(
        prompts,
        environment,
        model_folder,
        max_tokens=max_tokens,
        temperature=temperature,
        samples=samples,
        reward_timeout_s=reward_timeout_s,
        max_turns=max_turns,
        name=name,
        max_inflight_prompts=max_inflight_prompts,
    )
    wanted, key = model or adapter or None, engine_api_key
    servers = [open_engine(address, timeout_s=engine_timeout_s, model=wanted, api_key=key) for address in engine]
    fleet = Fleet(servers)

    async def evaluated() -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(fleet.aclose)
            await fleet.prepare(start_timeout_s)
            await check_tokenizer(servers, model_folder, held_out.prompts)
            result = await held_out.evaluate(fleet)
            result |= {"adapter": adapter, "producer": f"{socket.gethostname()}-{os.getpid()}"}
            if url is not None and run is not None:
                client = AsyncClient(url, run, token=token, retry_for_s=RETRY_FOR_S)
                request = msgspec.convert(result, EvaluationRequest)
                await stack.enter_async_context(client)
                result = msgspec.to_builtins(await client.record_evaluation(request))
            return result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(evaluated())
    if json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(_table(result))


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"evaluation {result['name']}", title_justify="left", show_header=False)
    error = result["standard_error"]
    for name, value in (
        ("policy version", ", ".join(str(version) for version in result["versions"])),
        ("mean reward", f"{result['reward_mean']:.4f}" + ("" if error is None else f" ± {error:.4f}")),
        *((f"  {part}", f"{mean:.4f}") for part, mean in result["parts"].items()),
        (
            "completions",
            f"{result['rollouts']}, {result['samples']} per prompt at temperature {result['temperature']:g}",
        ),
        ("prompts failed", result["failed"]),
        ("seconds", f"{result['seconds']:.1f}"),
    ):
        table.add_row(name, str(value))
    return table
