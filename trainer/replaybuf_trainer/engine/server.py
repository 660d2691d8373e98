"""HTTP API of the engine: completions as vLLM answers them, weights and pauses as vLLM's RL endpoints do.

Deliberate differences from vLLM: every choice of `/v1/completions` has `weight_versions` (vLLM has them on its token
endpoint from 0.32 on), `prompt_logprobs` lists only each token's own logprob, and broken weights are rejected with 500
while the old weights keep serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import uvicorn
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers import AutoTokenizer

from replaybuf.errors import Invalid, NotFound, ReplaybufError, ServiceUnavailable
from replaybuf_trainer.engine.sampler import Row
from replaybuf_trainer.engine.worker import Worker
from replaybuf_trainer.model import load_model
from replaybuf_trainer.options import EngineOptions

logger = logging.getLogger(__name__)

LARGEST_N = 1024
_numbers = itertools.count()
_ABORTED = 'vllm:request_success_total{finished_reason="abort"}'
"""vLLM's counter of completions that ended because their client was gone."""


class CompletionRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/completions`; other parameters of vLLM are ignored.

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
    """Body of `POST /tokenize`."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class RpcRequest(msgspec.Struct, frozen=True):
    """Body of `POST /collective_rpc`; the only method is `reload_weights`."""

    method: str
    kwargs: dict[str, Any] = {}


class VersionRequest(msgspec.Struct, frozen=True):
    """Body of `POST /update_weight_version`: a whole number, as a number or a string."""

    new_version: str | int


class Engine:
    """One model behind HTTP: the handlers of all routes."""

    def __init__(self, worker: Worker, tokenizer: Any, *, name: str, eos_token_id: int, context_tokens: int) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._name = name
        self._eos_token_id = eos_token_id
        self._context_tokens = context_tokens
        self._random = np.random.default_rng()

    # ------------------------------------------------------------------ completions

    async def completions(self, request: Request) -> Any:
        """Sample `n` completions of every prompt."""
        asked: CompletionRequest = await _read(request, CompletionRequest)
        self._check_model(asked.model)
        rows = self._rows(asked)
        await self._sample(request, rows)
        generated = sum(len(row.token_ids) for row in rows)
        prompt_tokens = sum(len(row.prompt_ids) for row in rows[:: asked.n])
        return {
            "id": f"cmpl-{next(_numbers)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [self._choice(asked, number, row) for number, row in enumerate(rows)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": prompt_tokens + generated,
            },
        }

    async def _sample(self, request: Request, rows: list[Row]) -> None:
        """Sample rows; end them if the client closes the connection, as vLLM does."""
        done = asyncio.wrap_future(self._worker.submit(rows))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                await asyncio.wrap_future(self._worker.abort(rows))
            await done
        finally:
            gone.cancel()

    async def tokenize(self, request: Request) -> Any:
        """Encode a text."""
        asked: TokenizeRequest = await _read(request, TokenizeRequest)
        self._check_model(asked.model)
        tokens = self._tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        return {"count": len(tokens), "max_model_len": self._context_tokens, "tokens": tokens}

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._name):
            detail = f"model {model!r} does not exist; this server has {self._name!r}"
            raise NotFound(detail, name="model", value=model, bound=[self._name])

    def _rows(self, asked: CompletionRequest) -> list[Row]:
        """Return the rows of a request, `n` for every prompt. Raises `Invalid` for values out of bounds."""
        prompts = self._prompts(asked.prompt)
        for prompt in prompts:
            self._check_prompt(prompt, asked.max_tokens)
        count = len(prompts) * asked.n
        if count > LARGEST_N:
            raise Invalid(
                f"the request has {len(prompts)} prompts with {asked.n} completions each; the maximum is {LARGEST_N}",
                name="n",
                value=count,
                bound=LARGEST_N,
            )
        if asked.stream:
            raise Invalid("stream is true; this engine answers whole completions", name="stream", value=True)
        stop = frozenset({self._eos_token_id, *asked.stop_token_ids})
        random = self._random
        if asked.seed is not None:
            random = np.random.Generator(np.random.Philox(key=asked.seed & ((1 << 64) - 1)))
        uniforms = random.random((count, asked.max_tokens))
        scored = asked.prompt_logprobs is not None
        return [
            Row(prompts[i // asked.n], asked.max_tokens, asked.temperature, stop, uniforms[i], score_prompt=scored)
            for i in range(count)
        ]

    def _prompts(self, given: list[int | list[int]] | str) -> list[list[int]]:
        if isinstance(given, str):
            return [self._tokenizer.encode(given)]
        ids = [token for token in given if isinstance(token, int)]
        several = [prompt for prompt in given if not isinstance(prompt, int)]
        if ids and several:
            raise Invalid("prompt mixes token ids and lists of token ids", name="prompt")
        return several or [ids]

    def _check_prompt(self, prompt: list[int], max_tokens: int) -> None:
        most, vocabulary = self._context_tokens - max_tokens, len(self._tokenizer)
        if not prompt or len(prompt) > most:
            raise Invalid(
                f"prompt has {len(prompt)} tokens; with max_tokens {max_tokens} it may have 1 to {most}, the "
                f"model's context is {self._context_tokens}",
                name="prompt",
                value=len(prompt),
                bound=most,
            )
        if not all(0 <= token < vocabulary for token in prompt):
            raise Invalid(f"prompt has a token outside 0..{vocabulary - 1}", name="prompt", bound=vocabulary)

    def _choice(self, asked: CompletionRequest, number: int, row: Row) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "text": self._tokenizer.decode(row.token_ids, skip_special_tokens=True),
            "finish_reason": row.finish_reason,
            "stop_reason": None,
            "logprobs": None,
            "weight_versions": _spans(row.versions),
        }
        if asked.logprobs is not None:
            tokens = self._tokenizer.convert_ids_to_tokens(row.token_ids)
            columns = {"tokens": tokens, "token_logprobs": row.logprobs, "top_logprobs": None, "text_offset": []}
            choice["logprobs"] = columns
        if asked.prompt_logprobs is not None:
            pairs = zip(row.prompt_ids[1:], row.prompt_logprobs, strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in pairs)]
        if asked.return_token_ids:
            choice |= {"token_ids": row.token_ids, "prompt_token_ids": row.prompt_ids}
        return choice

    # ------------------------------------------------------------------ weights and pauses

    async def pause(self, request: Request) -> Any:
        """Pause sampling by `mode`."""
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise Invalid(f"mode is {mode!r}; it must be abort, wait or keep", name="mode", value=mode)
        await asyncio.wrap_future(self._worker.pause(mode))  # type: ignore[arg-type]
        return {"status": "paused"}

    async def resume(self, _: Request) -> Any:
        """Resume sampling."""
        await asyncio.wrap_future(self._worker.resume())
        return {"status": "resumed"}

    async def is_paused(self, _: Request) -> Any:
        """Report whether sampling is paused."""
        return {"is_paused": self._worker.paused}

    async def weight_info(self, _: Request) -> Any:
        """Report the version of the weights."""
        return {"weight_version": str(self._worker.version)}

    async def update_weight_version(self, request: Request) -> Any:
        """Set the version of the present weights."""
        asked: VersionRequest = await _read(request, VersionRequest)
        try:
            version = int(asked.new_version)
        except ValueError:
            detail = f"new_version is {asked.new_version!r}; it must be a whole number"
            raise Invalid(detail, name="new_version", value=asked.new_version) from None
        await asyncio.wrap_future(self._worker.label(version))
        return {"success": True, "new_version": str(version)}

    async def collective_rpc(self, request: Request) -> Any:
        """Load the weights of a folder."""
        asked: RpcRequest = await _read(request, RpcRequest)
        if asked.method != "reload_weights":
            detail = f"method is {asked.method!r}; this engine has reload_weights"
            raise Invalid(detail, name="method", value=asked.method)
        folder = asked.kwargs.get("weights_path")
        if not isinstance(folder, str):
            raise Invalid("kwargs.weights_path is missing; it must be the path of a model folder", name="kwargs")
        try:
            await asyncio.wrap_future(self._worker.reload(Path(folder)))
        except Invalid as error:
            logger.error("weights rejected, the old weights stay: %s", error.detail)
            return _error(500, error.detail, "weights_path")
        return {"results": [None]}

    # ------------------------------------------------------------------ state

    async def models(self, _: Request) -> Any:
        """List the one model."""
        model = {"id": self._name, "object": "model", "max_model_len": self._context_tokens}
        return {"object": "list", "data": [model]}

    async def health(self, _: Request) -> Any:
        """Report that the process answers."""
        return Response(status_code=200)

    async def metrics(self, _: Request) -> Any:
        """Return the figures that generators read, as Prometheus text."""
        figures = (
            ("num_requests_running", "gauge", self._worker.rows_running),
            ("num_requests_waiting", "gauge", self._worker.rows_waiting),
            ("generation_tokens_total", "counter", self._worker.generated_tokens),
        )
        aborted = f"# TYPE vllm:request_success_total counter\n{_ABORTED} {self._worker.rows_aborted}\n"
        lines = (f"# TYPE vllm:{name} {kind}\nvllm:{name} {value}\n" for name, kind, value in figures)
        return Response("".join((*lines, aborted)), media_type="text/plain; version=0.0.4")


def application(engine: Engine) -> Starlette:
    """Return the ASGI application of one engine."""
    post: dict[str, Callable[[Request], Awaitable[Any]]] = {
        "/v1/completions": engine.completions,
        "/tokenize": engine.tokenize,
        "/pause": engine.pause,
        "/resume": engine.resume,
        "/update_weight_version": engine.update_weight_version,
        "/collective_rpc": engine.collective_rpc,
    }
    get: dict[str, Callable[[Request], Awaitable[Any]]] = {
        "/v1/models": engine.models,
        "/health": engine.health,
        "/metrics": engine.metrics,
        "/is_paused": engine.is_paused,
        "/weight_info": engine.weight_info,
    }
    routes = [
        Route(path, _answer(handler), methods=[method])
        for method, handlers in (("POST", post), ("GET", get))
        for path, handler in handlers.items()
    ]
    return Starlette(routes=routes, exception_handlers={ReplaybufError: _reject})


async def serve(options: EngineOptions) -> None:
    """Load a model and serve it until SIGTERM or SIGINT. Raises `Invalid`, `ServiceUnavailable`."""
    model = load_model(options.model)
    worker = Worker(model, max_rows=options.max_rows, threads=options.threads)
    engine = Engine(
        worker,
        AutoTokenizer.from_pretrained(options.model, local_files_only=True),
        name=options.name,
        eos_token_id=int(model.config.eos_token_id),
        context_tokens=int(model.config.max_position_embeddings),
    )
    listening = _listen(options.host, options.port)
    config = uvicorn.Config(
        application(engine),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        server_header=False,
    )
    worker.start()
    try:
        print(f"listening on http://{options.host}:{listening.getsockname()[1]}", flush=True)
        await _Server(config).serve(sockets=[listening])
    finally:
        worker.close()
        worker.join(5.0)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End with exit code 0: uvicorn would raise the signal again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def _listen(host: str, port: int) -> socket.socket:
    # asyncio sets TCP_NODELAY only on sockets that name their protocol
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise ServiceUnavailable(f"cannot listen on {host}:{port}: {error.strerror}", name="port", value=port) from None
    return listening


def _answer(handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Encode what a handler returns as JSON, unless it is a response."""

    async def endpoint(request: Request) -> Response:
        result = await handler(request)
        return result if isinstance(result, Response) else _json(result)

    return endpoint


async def _disconnected(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, shape: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.body(), type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"body: {error}", name="body") from error


async def _reject(_: Request, error: Exception) -> Response:
    if not isinstance(error, ReplaybufError):
        return _error(500, f"{type(error).__name__}: {error}")
    return _error(400 if isinstance(error, Invalid) else error.status, error.detail, error.name)


def _error(status: int, message: str, parameter: str | None = None) -> Response:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return _json({"error": {"message": message, "type": kind, "param": parameter, "code": status}}, status)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Return the runs of equal versions as vLLM writes them."""
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": str(version), "start": position, "end": position + 1})
    return spans
