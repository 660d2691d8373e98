"""The HTTP side of the engine: completions as vLLM answers them, weights and pauses as its RL endpoints do.

Differences from vLLM, on purpose: every choice of `/v1/completions` carries `weight_versions` (vLLM has them on its
token endpoint from 0.32 on), `prompt_logprobs` tells each token's own logprob alone, and broken weights are refused
with 500 while the old ones go on serving.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replaybuf.errors import Invalid, ReplaybufError
from replaybuf_trainer.engine.sampler import Row
from replaybuf_trainer.engine.worker import Worker

logger = logging.getLogger(__name__)

LARGEST_N = 1024
_numbers = itertools.count()


class CompletionRequest(msgspec.Struct, frozen=True):
    """What `POST /v1/completions` takes; parameters of vLLM that are not listed are ignored.

    `prompt`: a text, token ids, or several prompts of token ids, each completed `n` times.
    """

    prompt: list[int | list[int]] | str
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=LARGEST_N)] = 1
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    return_token_ids: bool = False
    top_p: Annotated[float, Meta(ge=1, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=0)] = 0
    stream: bool = False


class TokenizeRequest(msgspec.Struct, frozen=True):
    """A text to encode."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class RpcRequest(msgspec.Struct, frozen=True):
    """A call to every worker; `reload_weights` is the one there is."""

    method: str
    kwargs: dict[str, Any] = {}


class VersionRequest(msgspec.Struct, frozen=True):
    """A name for the present weights: a whole number, as text or not."""

    new_version: str | int


class Engine:
    """The state the routes share."""

    def __init__(self, worker: Worker, tokenizer: Any, *, name: str, eos_token_id: int, context_tokens: int) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self.name = name
        self.eos_token_id = eos_token_id
        self.context_tokens = context_tokens
        self.vocabulary = len(tokenizer)
        self.random = np.random.default_rng()

    def rows(self, asked: CompletionRequest) -> list[Row]:
        """Make the rows of a request, `n` for every prompt. Raises `Invalid` for what is out of bounds."""
        prompts = self._prompts(asked.prompt)
        for prompt in prompts:
            self._check_prompt(prompt, asked.max_tokens)
        count = len(prompts) * asked.n
        if count > LARGEST_N:
            raise Invalid(
                f"{len(prompts)} prompts, {asked.n} completions each; at most {LARGEST_N} in one request",
                name="n",
                value=count,
                bound=LARGEST_N,
            )
        if asked.stream:
            raise Invalid("stream is true; this engine answers whole completions", name="stream", value=True)
        stop = frozenset({self.eos_token_id, *asked.stop_token_ids})
        uniforms = self._uniforms(asked, count)
        scored = asked.prompt_logprobs is not None
        return [
            Row(prompts[i // asked.n], asked.max_tokens, asked.temperature, stop, uniforms[i], score_prompt=scored)
            for i in range(count)
        ]

    def _prompts(self, given: list[int | list[int]] | str) -> list[list[int]]:
        if isinstance(given, str):
            return [self.tokenizer.encode(given)]
        ids = [token for token in given if isinstance(token, int)]
        several = [prompt for prompt in given if not isinstance(prompt, int)]
        if ids and several:
            raise Invalid("prompt mixes token ids and lists of them", name="prompt")
        return several or [ids]

    def _check_prompt(self, prompt: list[int], max_tokens: int) -> None:
        room = self.context_tokens - max_tokens
        if not prompt or len(prompt) > room:
            raise Invalid(
                f"prompt has {len(prompt)} tokens; with max_tokens {max_tokens} it may have 1 to {room}, the "
                f"model's context is {self.context_tokens}",
                name="prompt",
                value=len(prompt),
                bound=room,
            )
        if not all(0 <= token < self.vocabulary for token in prompt):
            raise Invalid(
                f"prompt holds a token outside 0..{self.vocabulary - 1}", name="prompt", bound=self.vocabulary
            )

    def _uniforms(self, asked: CompletionRequest, count: int) -> Any:
        source = self.random
        if asked.seed is not None:
            source = np.random.Generator(np.random.Philox(key=asked.seed & ((1 << 64) - 1)))
        return source.random((count, asked.max_tokens))


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _error(status: int, message: str, parameter: str | None = None) -> Response:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return _json({"error": {"message": message, "type": kind, "param": parameter, "code": status}}, status)


def _no_such_model(engine: Engine, model: str | None) -> Response:
    return _error(404, f"model {model!r} does not exist; this server has {engine.name!r}", "model")


async def _read(request: Request, shape: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.body(), type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"body: {error}", name="body") from error


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


async def _completions(request: Request) -> Response:
    engine = _engine(request)
    asked: CompletionRequest = await _read(request, CompletionRequest)
    if asked.model not in (None, engine.name):
        return _no_such_model(engine, asked.model)
    rows = engine.rows(asked)
    await asyncio.wrap_future(engine.worker.submit(rows))
    choices = [_choice(engine, asked, number, row) for number, row in enumerate(rows)]
    generated = sum(len(row.token_ids) for row in rows)
    prompt_tokens = sum(len(row.prompt_ids) for row in rows[:: asked.n])
    return _json(
        {
            "id": f"cmpl-{next(_numbers)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": prompt_tokens + generated,
            },
        }
    )


async def _tokenize(request: Request) -> Response:
    engine = _engine(request)
    asked: TokenizeRequest = await _read(request, TokenizeRequest)
    if asked.model not in (None, engine.name):
        return _no_such_model(engine, asked.model)
    tokens = engine.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
    return _json({"count": len(tokens), "max_model_len": engine.context_tokens, "tokens": tokens})


def _choice(engine: Engine, asked: CompletionRequest, number: int, row: Row) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": number,
        "text": engine.tokenizer.decode(row.token_ids, skip_special_tokens=True),
        "finish_reason": row.finish_reason,
        "stop_reason": None,
        "logprobs": None,
        "weight_versions": _spans(row.versions),
    }
    if asked.logprobs is not None:
        tokens = engine.tokenizer.convert_ids_to_tokens(row.token_ids)
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": row.logprobs, "top_logprobs": None, "text_offset": []}
    if asked.prompt_logprobs is not None:
        own = [
            {str(token): {"logprob": value}}
            for token, value in zip(row.prompt_ids[1:], row.prompt_logprobs, strict=True)
        ]
        choice["prompt_logprobs"] = [None, *own]
    if asked.return_token_ids:
        choice |= {"token_ids": row.token_ids, "prompt_token_ids": row.prompt_ids}
    return choice


def _spans(versions: list[int]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": str(version), "start": position, "end": position + 1})
    return spans


async def _pause(request: Request) -> Response:
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        return _error(400, f"mode is {mode!r}; it must be abort, wait or keep", "mode")
    await asyncio.wrap_future(_engine(request).worker.pause(mode))  # type: ignore[arg-type]
    return _json({"status": "paused"})


async def _resume(request: Request) -> Response:
    await asyncio.wrap_future(_engine(request).worker.resume())
    return _json({"status": "resumed"})


async def _is_paused(request: Request) -> Response:
    return _json({"is_paused": _engine(request).worker.paused})


async def _weight_info(request: Request) -> Response:
    return _json({"weight_version": str(_engine(request).worker.version)})


async def _update_weight_version(request: Request) -> Response:
    asked: VersionRequest = await _read(request, VersionRequest)
    try:
        version = int(asked.new_version)
    except ValueError:
        return _error(400, f"new_version is {asked.new_version!r}; a whole number is needed", "new_version")
    await asyncio.wrap_future(_engine(request).worker.label(version))
    return _json({"success": True, "new_version": str(version)})


async def _collective_rpc(request: Request) -> Response:
    asked: RpcRequest = await _read(request, RpcRequest)
    if asked.method != "reload_weights":
        return _error(400, f"method is {asked.method!r}; this engine has reload_weights", "method")
    folder = asked.kwargs.get("weights_path")
    if not isinstance(folder, str):
        return _error(400, "kwargs.weights_path is missing; the path of a model folder is needed", "kwargs")
    try:
        await asyncio.wrap_future(_engine(request).worker.reload(Path(folder)))
    except Invalid as error:
        logger.error("weights refused, the old ones go on: %s", error.detail)
        return _error(500, error.detail, "weights_path")
    return _json({"results": [None]})


async def _models(request: Request) -> Response:
    engine = _engine(request)
    return _json(
        {"object": "list", "data": [{"id": engine.name, "object": "model", "max_model_len": engine.context_tokens}]}
    )


async def _health(_: Request) -> Response:
    return Response(status_code=200)


async def _metrics(request: Request) -> Response:
    worker = _engine(request).worker
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running {worker.rows_running}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting {worker.rows_waiting}",
        "# TYPE vllm:generation_tokens_total counter",
        f"vllm:generation_tokens_total {worker.generated_tokens}",
    ]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, Invalid):
        return _error(400, error.detail, error.name)
    detail = error.detail if isinstance(error, ReplaybufError) else f"{type(error).__name__}: {error}"
    return _error(error.status if isinstance(error, ReplaybufError) else 500, detail)


def application(engine: Engine) -> Starlette:
    """Wire the routes of one engine."""
    app = Starlette(
        routes=[
            Route("/v1/completions", _completions, methods=["POST"]),
            Route("/v1/models", _models),
            Route("/tokenize", _tokenize, methods=["POST"]),
            Route("/health", _health),
            Route("/metrics", _metrics),
            Route("/pause", _pause, methods=["POST"]),
            Route("/resume", _resume, methods=["POST"]),
            Route("/is_paused", _is_paused),
            Route("/weight_info", _weight_info),
            Route("/update_weight_version", _update_weight_version, methods=["POST"]),
            Route("/collective_rpc", _collective_rpc, methods=["POST"]),
        ],
        exception_handlers={ReplaybufError: _refused},
    )
    app.state.engine = engine
    return app
