"""An engine of the trainer package behind real HTTP, in this process, and an oracle to check its answers."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

from replaybuf_trainer.engine.server import Engine, application
from replaybuf_trainer.engine.worker import Worker
from replaybuf_trainer.models.loading import load_model, save_model
from replaybuf_trainer.models.tiny import character_tokenizer, new_model
from tests.waiting import eventually

TIMEOUT_S = 60.0
NAME = "policy"
WORD = [70, 88, 79, 79, 68, 33]
LONG = {"n": 24, "max_tokens": 160}
"""With random weights 1 token in 98 ends a completion."""


def write_model(folder: Path, seed: int) -> Path:
    """Write a model folder with random weights of this seed; return it."""
    tokens = folder.parent / "tokenizer"
    if not tokens.is_dir():
        character_tokenizer().save_pretrained(tokens)
    save_model(new_model(seed), tokens, folder)
    return folder


def oracle(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    """Return the model's raw logprob of every completion token, by one plain forward pass of transformers."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
    sampled: list[float] = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1).tolist()
    return sampled


def confirmed() -> None:
    """Confirm that the trainer has the run."""


def in_background(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run a call in a separate thread."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(call, *args, **kwargs)
    threads.shutdown(wait=False)
    return future


class HeldWorker(Worker):
    """Samples as the engine's own worker, but can wait in the middle: else a busy test finds the completions done."""

    hold_at = math.inf
    """Number of sampled tokens from which on it samples only after the next command."""

    def _run_commands(self) -> None:
        if self.generated_tokens >= self.hold_at:
            with self._changed:
                self._changed.wait_for(lambda: self._commands or self._closed)
            self.hold_at = math.inf
        super()._run_commands()


class ServedEngine:
    """One engine and a client of it. `worker` is the engine's own, for tests that look inside."""

    def __init__(self, url: str, worker: HeldWorker, model: Any) -> None:
        self.url = url
        self.worker = worker
        self.model = model
        # The server closes an idle connection after 5 s; a request at that moment would fail.
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(keepalive_expiry=2.0))

    def post(self, path: str, body: Any = None) -> httpx.Response:
        """POST a JSON body."""
        return self.http.post(path, json=body)

    def complete(self, prompt: Sequence[int] | str, **parameters: Any) -> list[dict[str, Any]]:
        """Request completions with token ids and logprobs; return the choices."""
        response = self.ask(prompt, **parameters)
        assert response.status_code == 200, response.text
        choices: list[dict[str, Any]] = response.json()["choices"]
        return choices

    def ask(self, prompt: Sequence[int] | str, **parameters: Any) -> httpx.Response:
        """Request completions with token ids and logprobs."""
        return self.post("/v1/completions", {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **parameters})

    def hold(self) -> Callable[[], bool]:
        """Sample two tokens per row of `LONG`, then nothing before the next command; return whether it is so far."""
        self.worker.hold_at = hold_at = self.worker.generated_tokens + LONG["n"] + 1
        return lambda: self.worker.generated_tokens >= hold_at

    def in_the_middle(self, **parameters: Any) -> Future[list[dict[str, Any]]]:
        """Request long completions; return when some of their tokens are sampled and the engine is held."""
        is_held = self.hold()
        asked = in_background(self.complete, WORD, **LONG, **parameters)
        eventually(is_held, TIMEOUT_S)
        return asked

    def reload(self, folder: Path, version: int) -> None:
        """Load the weights in `folder` and label them."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert self.post("/collective_rpc", call).status_code == 200
        assert self.post("/update_weight_version", {"new_version": str(version)}).status_code == 200

    def metric(self, name: str) -> float:
        """Return one value of `GET /metrics`."""
        line = next(line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name))
        return float(line.rpartition(" ")[2])

    @property
    def port(self) -> int:
        """Port that the engine listens on."""
        return int(self.url.rpartition(":")[2])

    def version(self) -> str:
        """Return the version label of the current weights."""
        label: str = self.http.get("/weight_info").json()["weight_version"]
        return label


@contextlib.contextmanager
def served(folder: Path, port: int = 0) -> Iterator[ServedEngine]:
    """Serve a model folder until the block ends; port 0 takes a free one."""
    model = load_model(folder)
    worker = HeldWorker(model, max_rows=256, threads=1)
    shared = Engine(worker, character_tokenizer(), name=NAME, eos_token_id=2, context_tokens=256)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    config = uvicorn.Config(application(shared), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    worker.start()
    thread.start()
    eventually(lambda: server.started, TIMEOUT_S)
    engine = ServedEngine(f"http://127.0.0.1:{listening.getsockname()[1]}", worker, model)
    try:
        yield engine
    finally:
        engine.http.close()
        worker.close()
        worker.join(TIMEOUT_S)
        server.should_exit = True
        thread.join(TIMEOUT_S)
        listening.close()
