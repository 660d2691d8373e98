"""HTTP API of the engine: completions as vLLM answers them, weights, adapters and pauses as vLLM's RL endpoints do.

Deliberate differences from vLLM:

- Every choice of `/v1/completions` has `weight_versions`; vLLM has them on its token endpoint from 0.32 on.
- `prompt_logprobs` lists only each token's own logprob.
- Broken weights are rejected with 500, and broken adapters with 400; the old weights keep serving.
- Each LoRA adapter has its own version: `weight_version` of `/v1/load_lora_adapter`, `model` of
  `/update_weight_version` and of `/weight_info`. vLLM has one version per server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers import AutoTokenizer

from replaybuf.errors import Invalid, ReplaybufError, counted
from replaybuf.listening import listen, url_of
from replaybuf.logs import announce
from replaybuf_trainer.engine.answers import answer, error_response, reject, version_spans
from replaybuf_trainer.engine.requests import (
    LARGEST_N,
    CompletionRequest,
    LoadLoraRequest,
    RpcRequest,
    TokenizeRequest,
    UnloadLoraRequest,
    VersionRequest,
    read,
    whole_number,
)
from replaybuf_trainer.engine.sampler import Row
from replaybuf_trainer.engine.served_models import ServedModel, ServedModels, load_engine_model
from replaybuf_trainer.engine.weight_transfer import WeightTransfer
from replaybuf_trainer.engine.worker import Worker
from replaybuf_trainer.options import EngineOptions

logger = logging.getLogger(__name__)

_numbers = itertools.count()
_ABORTED = 'vllm:request_success_total{finished_reason="abort"}'
"""vLLM's counter of completions that ended because their client was gone."""


class Engine:
    """One model and its adapters behind HTTP: the handlers of all routes."""

    def __init__(self, worker: Worker, tokenizer: Any, *, name: str, eos_token_id: int, context_tokens: int) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._models = ServedModels(ServedModel(name), worker.read_lora, worker.replace_lora)
        self._eos_token_id = eos_token_id
        self._context_tokens = context_tokens
        self._random = np.random.default_rng()
        self.transfer = WeightTransfer(worker, self._models.base)

    # ------------------------------------------------------------------ completions

    async def completions(self, request: Request) -> Any:
        """Sample `n` completions of every prompt."""
        asked: CompletionRequest = await read(request, CompletionRequest)
        served = self._models.find(asked.model)
        rows = self._rows(asked, served)
        await self._sample(request, rows)
        generated = sum(len(row.token_ids) for row in rows)
        prompt_tokens = sum(len(row.prompt_ids) for row in rows[:: asked.n])
        return {
            "id": f"cmpl-{next(_numbers)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
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
        asked: TokenizeRequest = await read(request, TokenizeRequest)
        self._models.find(asked.model)
        tokens = self._tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        return {"count": len(tokens), "max_model_len": self._context_tokens, "tokens": tokens}

    def _rows(self, asked: CompletionRequest, served: ServedModel) -> list[Row]:
        """Return the rows of a request, `n` for every prompt. Raises `Invalid` for values out of bounds."""
        prompts = self._prompts(asked.prompt)
        for prompt in prompts:
            self._check_prompt(prompt, asked.max_tokens)
        count = len(prompts) * asked.n
        if count > LARGEST_N:
            raise Invalid(
                f"the request has {counted(len(prompts), 'prompt')} with {counted(asked.n, 'completion')} each; "
                f"the maximum is {LARGEST_N}",
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
            Row(
                prompts[i // asked.n],
                asked.max_tokens,
                asked.temperature,
                stop,
                uniforms[i],
                served,
                score_prompt=scored,
            )
            for i in range(count)
        ]

    def _prompts(self, prompts: list[int | list[int]] | str) -> list[list[int]]:
        if isinstance(prompts, str):
            return [self._tokenizer.encode(prompts)]
        ids = [token for token in prompts if isinstance(token, int)]
        several = [prompt for prompt in prompts if not isinstance(prompt, int)]
        if ids and several:
            raise Invalid("prompt mixes token ids and lists of token ids", name="prompt")
        return several or [ids]

    def _check_prompt(self, prompt: list[int], max_tokens: int) -> None:
        most, vocabulary = self._context_tokens - max_tokens, len(self._tokenizer)
        if not prompt or len(prompt) > most:
            raise Invalid(
                f"prompt has {counted(len(prompt), 'token')}; with max_tokens {max_tokens} it may have 1 to "
                f"{most}, the model's context is {self._context_tokens}",
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
            "weight_versions": version_spans(row.versions),
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

    async def weight_info(self, request: Request) -> Any:
        """Report the version of the weights of `model`."""
        return {"weight_version": str(self._models.find(request.query_params.get("model")).version)}

    async def update_weight_version(self, request: Request) -> Any:
        """Set the version of a model's present weights."""
        asked: VersionRequest = await read(request, VersionRequest)
        version = whole_number("new_version", asked.new_version)
        await asyncio.wrap_future(self._worker.label(self._models.find(asked.model), version))
        return {"success": True, "new_version": str(version)}

    async def collective_rpc(self, request: Request) -> Any:
        """Load the weights of a folder."""
        asked: RpcRequest = await read(request, RpcRequest)
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
            return error_response(500, error.detail, "weights_path")
        return {"results": [None]}

    async def load_lora_adapter(self, request: Request) -> Any:
        """Load a LoRA adapter, or replace it in place."""
        asked: LoadLoraRequest = await read(request, LoadLoraRequest)
        wanted = asked.weight_version
        version = None if wanted is None else whole_number("weight_version", wanted)
        await self._models.load(asked.lora_name, asked.lora_path, version, in_place=asked.load_inplace)
        return Response(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Any:
        """Unload a LoRA adapter."""
        asked: UnloadLoraRequest = await read(request, UnloadLoraRequest)
        await self._models.unload(asked.lora_name)
        return Response(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    # ------------------------------------------------------------------ state

    async def models(self, _: Request) -> Any:
        """List the base model and its adapters."""
        base = self._models.base.name
        common = {"object": "model", "max_model_len": self._context_tokens}
        adapters = [
            {"id": served.name, **common, "root": served.folder, "parent": base}
            for served in self._models.adapters.values()
        ]
        return {"object": "list", "data": [{"id": base, **common}, *adapters]}

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
        "/v1/load_lora_adapter": engine.load_lora_adapter,
        "/v1/unload_lora_adapter": engine.unload_lora_adapter,
        "/tokenize": engine.tokenize,
        "/pause": engine.pause,
        "/resume": engine.resume,
        "/update_weight_version": engine.update_weight_version,
        "/collective_rpc": engine.collective_rpc,
        "/init_weight_transfer_engine": engine.transfer.init,
        "/start_weight_update": engine.transfer.start,
        "/update_weights": engine.transfer.update,
        "/finish_weight_update": engine.transfer.finish,
    }
    get: dict[str, Callable[[Request], Awaitable[Any]]] = {
        "/v1/models": engine.models,
        "/health": engine.health,
        "/metrics": engine.metrics,
        "/is_paused": engine.is_paused,
        "/weight_info": engine.weight_info,
        "/get_world_size": engine.transfer.world_size,
    }
    routes = [
        Route(path, answer(handler), methods=[method])
        for method, handlers in (("POST", post), ("GET", get))
        for path, handler in handlers.items()
    ]
    return Starlette(routes=routes, exception_handlers={ReplaybufError: reject})


async def serve(options: EngineOptions) -> None:
    """Load a model and serve it until SIGTERM or SIGINT. Raises `Invalid`, `ServiceUnavailable`."""
    model = load_engine_model(options.model)
    worker = Worker(model, max_rows=options.max_rows, threads=options.threads)
    engine = Engine(
        worker,
        AutoTokenizer.from_pretrained(options.model, local_files_only=True),
        name=options.name,
        eos_token_id=int(model.config.eos_token_id),
        context_tokens=int(model.config.max_position_embeddings),
    )
    listening = listen(options.host, options.port, "--port")
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
        announce("listening on %s", url_of(options.host, listening.getsockname()[1]))
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


async def _disconnected(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
