"""Doubles over real loopback HTTP: an engine and a service that answer by script, and what tests build around them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from replaybuf.errors import ReplaybufError
from replaybuf.generator.environments import Environment, Score
from replaybuf.generator.prompts import Prompt
from replaybuf.wire.frame import decode_frame, split_frames
from replaybuf.wire.group import Group
from replaybuf.wire.text.model_tokenizer import Tokenizer
from tests.builders import RUN_STATUS, waiting_answer

LETTERS = "abcdefghijklmnopqrstuvwxyz> "
TIMEOUT_S = 100.0
"""Bound of what takes moments, for a machine that is starved for a minute."""
"""Limit of every wait of a test."""


def write_tokenizer(folder: Path, *, ends_texts: bool = False, **config: Any) -> Path:
    """Write a model folder whose tokenizer has one token per letter, and last `</s>`, on request after every text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    vocabulary = {letter: number for number, letter in enumerate(LETTERS)} | {"</s>": len(LETTERS)}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["</s>"])
    if ends_texts:
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
        )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_tokenizer(folder: Path) -> Tokenizer:
    """Build the tokenizer of `write_tokenizer`."""
    return Tokenizer(write_tokenizer(folder))


def ids(text: str) -> list[int]:
    """Spell a text in the token ids of that tokenizer."""
    return [LETTERS.index(letter) for letter in text]


def make_prompt(
    text: str = "abc", *, prompt_id: str | None = None, answer: str | None = None, **metadata: Any
) -> Prompt:
    """Build a prompt, one token per letter."""
    return Prompt(
        prompt_id or text, text, np.array(ids(text), np.int32), answer, metadata, "prompts file words.jsonl, line 1"
    )


class Spelling:
    """Environment: 1 for a completion that holds the prompt's answer, which is the default reply of `EngineDouble`."""

    def check(self, prompt: Prompt) -> None:
        """Accept any prompt."""

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Compare the completion with the prompt, spelled backwards."""
        return Score(float(completion_text == prompt.text[::-1]), {"length": float(len(completion_text))})


class Broken:
    """Environment that does the given call."""

    def __init__(self, score: Callable[[Prompt, str], Any]) -> None:
        self._score = score

    def check(self, prompt: Prompt) -> None:
        """Accept any prompt."""

    def score(self, prompt: Prompt, completion_text: str) -> Any:
        """Call the function."""
        return self._score(prompt, completion_text)


_: tuple[Environment, ...] = (Spelling(), Broken(lambda prompt, text: Score(0.0)))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # signals are the test runner's


@contextlib.asynccontextmanager
async def served(routes: list[Route], port: int = 0) -> AsyncIterator[str]:
    """Serve routes on a loopback port; yields the address."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        Starlette(routes=routes), log_config=None, lifespan="off", timeout_graceful_shutdown=1, ws="none"
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
        listening.close()


Script = Callable[[dict[str, Any]], Awaitable[Response | dict[str, Any] | None]]


def given_logprob(before: int, token: int) -> float:
    """Return the logprob that an `EngineDouble` gives a token after another."""
    return -(1 + before) / (2 + token)


def scored(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request with `prompt_logprobs`, as vLLM 0.31 does: every token beside the likeliest one."""
    choices = []
    for index, prompt in enumerate(request["prompt"]):
        entries: list[dict[str, Any] | None] = [None]
        for before, token in itertools.pairwise(prompt):
            likeliest = {"logprob": -0.001, "rank": 1, "decoded_token": "x"}
            own = {"logprob": given_logprob(before, token), "rank": 7, "decoded_token": "y"}
            entries.append({"999": likeliest, str(token): own})
        choices.append({"index": index, "text": "", "logprobs": None, "prompt_logprobs": entries})
    return {"id": "cmpl", "model": request["model"], "choices": choices, "usage": {}}


class EngineDouble:
    """A vLLM-style server that spells prompts backwards, or follows its next `script` if there is one.

    Requests with `prompt_logprobs` are answered by `given_logprob`.

    `labels`: report `weight_versions` per choice; `weight_info` False: that call is 404; `connections`: addresses of
    the clients.
    """

    def __init__(self, *, version: int | str = 0, labels: bool = True, model: str = "tiny") -> None:
        self.version: int | str = version
        self.labels = labels
        self.model = model
        self.weight_info = True
        self.healthy = True
        self.gauges: tuple[int, int] | None = None
        self.max_model_len: int | None = 64
        self.requests: list[dict[str, Any]] = []
        self.connections: set[Any] = set()
        self.calls: list[str] = []
        self.script: deque[Script] = deque()
        self.always: Script | None = None
        self.probed = asyncio.Event()
        self.url = ""

    @contextlib.asynccontextmanager
    async def up(self, port: int = 0) -> AsyncIterator[EngineDouble]:
        """Serve."""
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/weight_info", self._weight_info),
            Route("/update_weight_version", self._update_weight_version, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        async with served(routes, port) as self.url:
            yield self

    def choice(self, prompt: list[int], **changes: Any) -> dict[str, Any]:
        """Build one choice: the prompt backwards."""
        ids = prompt[::-1]
        made = {
            "index": 0,
            "text": "",
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": [-0.5 * (token + 1) for token in range(len(ids))], "tokens": []},
            "finish_reason": "stop",
        }
        if self.labels:
            made["weight_versions"] = [{"version": str(self.version), "start": 0, "end": len(ids)}]
        return made | changes

    def answer(self, request: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Build the answer to a request, its choices changed alike."""
        choices = [self.choice(request["prompt"], **{"index": index} | changes) for index in range(request["n"])]
        return {"id": "cmpl", "model": self.model, "choices": choices, "usage": {}}

    async def _completions(self, request: Request) -> Response:
        self.calls.append("completions")
        self.connections.add(request.client)
        body = await request.json()
        self.requests.append(body)
        script = self.script.popleft() if self.script else self.always
        made = await script(body) if script else None
        if isinstance(made, Response):
            return made
        usual = scored if "prompt_logprobs" in body else self.answer
        return JSONResponse(usual(body) if made is None else made)

    async def _models(self, request: Request) -> Response:
        self.calls.append("models")
        return JSONResponse({"object": "list", "data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _weight_info(self, request: Request) -> Response:
        self.calls.append("weight_info")
        if not self.weight_info:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"weight_version": self.version})

    async def _update_weight_version(self, request: Request) -> Response:
        self.version = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def _metrics(self, request: Request) -> Response:
        self.calls.append("metrics")
        if self.gauges is None:
            return Response(status_code=404)
        running, waiting = self.gauges
        labels = 'engine="0",model_name="tiny"'
        return Response(
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{{{labels}}} {running}.0\nvllm:num_requests_waiting{{{labels}}} {waiting}.0\n"
        )

    async def _health(self, request: Request) -> Response:
        self.calls.append("health")
        self.probed.set()
        return Response(status_code=200 if self.healthy else 503)


class Gate:
    """Script: the usual answer once `open` is set; `arrived` counts the requests."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.arrived = asyncio.Semaphore(0)

    async def __call__(self, request: dict[str, Any]) -> None:
        self.arrived.release()
        await self.open.wait()

    async def requests(self, count: int) -> None:
        """Wait until `count` requests have come."""
        for _ in range(count):
            await self.arrived.acquire()


def reply(**changes: Any) -> Script:
    """Script: the usual answer with every choice changed."""

    async def script(request: dict[str, Any]) -> dict[str, Any]:
        return EngineDouble().answer(request, **changes)

    return script


def fail(status: int, text: str | bytes = "it broke") -> Script:
    """Script: an error."""

    async def script(request: dict[str, Any]) -> Response:
        return Response(text, status)

    return script


class ServiceDouble:
    """The producer's side of a service: tickets, appends judged by `judge`, a policy that can be waited for.

    `prompts`: size of the supply; `open`: how many tickets may still be issued before `change` allows more; `faults`:
    errors that the next calls are answered with, by the name of the handler.
    """

    def __init__(self, *, prompts: int | None = None, group_size: int | None = 4, **config: Any) -> None:
        self.config = {"batch": {"seq_len": 64, "tokens_per_batch": 4096}, "group_size": group_size} | config
        self.prompts = prompts
        self.published = 0
        self.state = "running"
        self.heartbeats: list[tuple[str, dict[str, Any]]] = []
        self.next_index = 0
        self.open = 1 << 30
        self.out: dict[str, int] = {}
        self.returned: list[tuple[str, str]] = []
        self.appended: list[list[Group]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.faults: dict[str, deque[ReplaybufError]] = {}
        self.judge: Callable[[Group], str | None] = lambda group: None
        self.expires_in_s = 600.0
        self.changed = asyncio.Condition()
        self.url = ""

    @property
    def groups(self) -> list[Group]:
        """All groups stored."""
        return [group for groups in self.appended for group in groups]

    @contextlib.asynccontextmanager
    async def up(self, port: int = 0) -> AsyncIterator[ServiceDouble]:
        """Serve."""
        root = "/v1/runs/r"
        routes = [
            Route(root, self._guarded(self._run)),
            Route(f"{root}/tickets", self._guarded(self._tickets), methods=["POST"]),
            Route(f"{root}/tickets/{{ticket}}", self._guarded(self._return), methods=["DELETE"]),
            Route(f"{root}/groups", self._guarded(self._groups), methods=["POST"]),
            Route(f"{root}/policy", self._guarded(self._policy)),
            Route(f"{root}/producers/{{producer}}", self._guarded(self._heartbeat), methods=["PUT"]),
            Route(f"{root}/evaluations", self._guarded(self._evaluations), methods=["GET"]),
            Route(f"{root}/evaluations", self._guarded(self._evaluation), methods=["POST"]),
        ]
        async with served(routes, port) as self.url:
            yield self

    async def change(self, **values: Any) -> None:
        """Set attributes and wake the held calls."""
        async with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> bool:
        """Wait for a change that makes the condition true; False where `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s), self.changed:
                await self.changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            faults = self.faults.get(handler.__name__.removeprefix("_"))
            if faults:
                error = faults.popleft()
                await self.change()
                headers = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
                return JSONResponse(error.problem(), error.status, headers, media_type="application/problem+json")
            return await handler(request)

        return guarded

    async def _run(self, request: Request) -> Response:
        return JSONResponse(RUN_STATUS | {"config": self.config})

    async def _tickets(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        await self.change()
        await self.until(lambda: self._supply > 0, body["wait_ms"] / 1000)
        count = min(body["count"], self._supply)
        tickets = []
        for index in range(self.next_index, self.next_index + count):
            self.out[f"t{index}"] = index
            ticket = {"ticket": f"t{index}", "prompt_index": index, "attempt": 1, "expires_in_s": self.expires_in_s}
            tickets.append(ticket)
        await self.change(next_index=self.next_index + count, open=self.open - count)
        answer: dict[str, Any] = {"tickets": tickets, "published_version": self.published}
        if not tickets:
            finished = self.prompts is not None and self.next_index >= self.prompts
            blocked_on = ("producers" if self.out else "nothing") if finished else "trainer"
            reason = "finished" if finished else "rate_limited"
            answer["waiting"] = msgspec.to_builtins(waiting_answer(reason, blocked_on, retry_after_s=0.05))
        return JSONResponse(answer)

    @property
    def _supply(self) -> int:
        left = self.open if self.prompts is None else self.prompts - self.next_index
        return max(0, min(left, self.open))

    async def _return(self, request: Request) -> Response:
        ticket = request.path_params["ticket"]
        self.returned.append((ticket, request.query_params["reason"]))
        self.out.pop(ticket, None)
        await self.change()
        return JSONResponse({})

    async def _groups(self, request: Request) -> Response:
        groups = [decode_frame(bytes(frame)) for frame in split_frames(await request.body())]
        results: list[dict[str, Any]] = []
        stored = []
        for group in groups:
            reason = self.judge(group)
            if reason is None and group.policy_version_max > self.published:
                reason = "version_above_published"
            status = "rejected" if reason else "stored"
            results.append({"group_id": f"p{group.prompt_index}", "status": status, "reason": reason})
            if reason is None:
                stored.append(group)
                self.out.pop(group.ticket or "", None)
        self.appended.append(stored)
        await self.change()
        if not stored:
            problem = {
                "type": "urn:replaybuf:problem:invalid-groups",
                "status": 422,
                "detail": "all",
                "results": results,
            }
            return JSONResponse(problem, 422)
        return JSONResponse({"results": results})

    async def _evaluations(self, request: Request) -> Response:
        return JSONResponse({"evaluations": self.evaluations})

    async def _evaluation(self, request: Request) -> Response:
        result = await request.json() | {"at_s": 0.0, "generation": 0}
        await self.change(evaluations=[*self.evaluations, result])
        return JSONResponse(result)

    async def _heartbeat(self, request: Request) -> Response:
        self.heartbeats.append((request.path_params["producer"], await request.json()))
        return JSONResponse({"published_version": self.published, "state": self.state, "heartbeat_s": 0.3})

    async def _policy(self, request: Request) -> Response:
        after = int(request.query_params.get("after", -1))
        await self.until(lambda: self.published > after, int(request.query_params.get("wait_ms", 0)) / 1000)
        return JSONResponse({"version": self.published, "weights_uri": None, "adapters": {}})
