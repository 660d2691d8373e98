"""Engine doubles with the exact answer shapes of vLLM 0.31, 0.32 and SGLang, and with faults.

Shapes: vLLM `entrypoints/scale_out/token_in_token_out`, seen from a running 0.31; SGLang `srt/managers/io_struct.py`,
`srt/managers/tokenizer_manager.py`, `srt/utils/weight_versions.py`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.generator.doubles import served
from tests.generator.engines.contract import Fault

CONTEXT_TOKENS = 256
NAME = "policy"
ABSENT = -9999.0


@dataclasses.dataclass
class Asked:
    """A decoded request; `seeds`: one per completion."""

    prompt: list[int]
    seeds: list[int | None]
    parameters: dict[str, Any]

    @property
    def max_tokens(self) -> int:
        """Longest completion."""
        tokens: int = self.parameters.get("max_tokens") or self.parameters["max_new_tokens"]
        return tokens


@dataclasses.dataclass
class Made:
    """A sampled completion, before it is shaped."""

    index: int
    ids: list[int]
    logprobs: list[float]
    finish_reason: str


class ShapedEngine(abc.ABC):
    """Samples uniformly over 16 tokens and answers in the subclass's shapes."""

    prefix = ""
    vocab_size = 16
    prompt: Sequence[int] = (3, 1, 4, 1, 5)
    one_if_greedy = False
    """Reject several completions at temperature 0, as vLLM does."""

    def __init__(self) -> None:
        self.address = ""
        self.version = "default"
        self.bodies: list[dict[str, Any]] = []
        self._faults: deque[Fault] = deque()
        self._key: str | None = None
        self._abort = asyncio.Event()
        self._random = random.Random(0)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[ShapedEngine]:
        """Serve."""
        async with served([*self.routes(), Route("/health", self._health), Route("/v1/models", self._models)]) as url:
            self.address = self.prefix + url
            yield self

    async def set_version(self, version: int) -> None:
        """Set the label of the weights."""
        self.version = str(version)

    async def abort_running(self) -> None:
        """Abort the next request."""
        self._abort.set()

    def fail_next(self, fault: Fault) -> None:
        """Make the next request for completions fail with a fault."""
        self._faults.append(fault)

    def require_key(self, key: str) -> None:
        """Answer 401 to requests without the key."""
        self._key = key

    @abc.abstractmethod
    def routes(self) -> list[Route]:
        """Return the routes beside models and health."""

    @abc.abstractmethod
    def asked(self, body: dict[str, Any]) -> Asked:
        """Read a request."""

    @abc.abstractmethod
    def answer(self, asked: Asked, made: Sequence[Made], fault: Fault | None) -> Any:
        """Shape an answer."""

    async def generate(self, request: Request) -> Response:
        """Answer one request for completions."""
        if (refusal := self.refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.bodies.append(body)
        asked = self.asked(body)
        if len(asked.prompt) + asked.max_tokens > CONTEXT_TOKENS:
            return JSONResponse({"error": {"message": "too long"}}, 400)
        if self.one_if_greedy and asked.parameters["temperature"] == 0 and len(asked.seeds) > 1:
            return JSONResponse({"error": {"message": "n must be 1 when using greedy sampling"}}, 400)
        fault = self._faults.popleft() if self._faults else None
        if fault is Fault.ERROR:
            return Response("it broke", 500)
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        made = [self._sampled(index, seed, asked) for index, seed in enumerate(asked.seeds)]
        if self._abort.is_set():
            self._abort.clear()
            made[-1] = Made(made[-1].index, made[-1].ids[:1], made[-1].logprobs[:1], "abort")
        return JSONResponse(self.answer(asked, _spoilt(made, fault), fault))

    def refusal(self, request: Request) -> Response | None:
        """Reject requests without the key."""
        if self._key is not None and request.headers.get("authorization") != f"Bearer {self._key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    def spans(self, made: Made) -> list[dict[str, Any]]:
        """Return version spans in the shape of vLLM 0.32 and newer SGLang."""
        return [{"version": self.version, "start": 0, "end": len(made.ids)}]

    def _sampled(self, index: int, seed: int | None, asked: Asked) -> Made:
        source = self._random
        if asked.parameters["temperature"] == 0:
            source = random.Random(str(asked.prompt))
        elif seed is not None:
            source = random.Random(seed)
        ids: list[int] = []
        stops = asked.parameters["stop_token_ids"]
        while len(ids) < asked.max_tokens and not (ids and ids[-1] in stops):
            ids.append(source.randrange(self.vocab_size))
        logprobs = [-math.log(self.vocab_size)] * len(ids)
        return Made(index, ids, logprobs, "stop" if ids[-1] in stops else "length")

    async def _models(self, request: Request) -> Response:
        card = {"id": NAME, "object": "model", "max_model_len": CONTEXT_TOKENS, "parent": None}
        return self.refusal(request) or JSONResponse({"object": "list", "data": [card]})

    async def _health(self, request: Request) -> Response:
        return Response()


def _spoilt(made: list[Made], fault: Fault | None) -> list[Made]:
    if fault is Fault.FEWER_CHOICES:
        return made[:-1]
    if fault is Fault.BACKWARDS:
        return made[::-1]
    if fault is Fault.SAME_INDEX:
        for completion in made:
            completion.index = 0
    if fault is Fault.NO_LOGPROBS:
        made[-1].logprobs = []
    if fault is Fault.FEWER_LOGPROBS:
        made[-1].logprobs.pop()
    if fault is Fault.ABSENT_LOGPROB:
        made[-1].logprobs[-1] = ABSENT
    return made


class VllmCompletions(ShapedEngine):
    """vLLM 0.31 started without `--enable-scale-out`."""

    one_if_greedy = True

    def routes(self) -> list[Route]:
        """Serve completions and the label of the weights."""
        return [
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/weight_info", self._weight_info),
        ]

    def asked(self, body: dict[str, Any]) -> Asked:
        """Read a request."""
        return Asked(body["prompt"], _consecutive(body.get("seed"), body["n"]), body)

    def answer(self, asked: Asked, made: Sequence[Made], fault: Fault | None) -> Any:
        """Shape an answer."""
        prompt = [0] if fault is Fault.OTHER_PROMPT else asked.prompt
        choices = [
            {
                "index": completion.index,
                "text": "",
                "logprobs": {
                    "text_offset": [],
                    "token_logprobs": completion.logprobs,
                    "tokens": [f"token_id:{token}" for token in completion.ids],
                    "top_logprobs": [],
                },
                "finish_reason": completion.finish_reason,
                "stop_reason": None,
                "token_ids": completion.ids,
                "prompt_logprobs": None,
                "prompt_token_ids": prompt,
            }
            for completion in made
        ]
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": NAME, "choices": choices}

    async def _weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.version})


class VllmTokens031(VllmCompletions):
    """vLLM 0.31 with `--enable-scale-out`: no version spans, tokens of logprobs as text."""

    def routes(self) -> list[Route]:
        """Serve token ids in and out, and the label of the weights."""
        return [
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/weight_info", self._weight_info),
        ]

    def asked(self, body: dict[str, Any]) -> Asked:
        """Read a request."""
        parameters = body["sampling_params"]
        return Asked(body["token_ids"], _consecutive(parameters.get("seed"), parameters["n"]), parameters)

    def answer(self, asked: Asked, made: Sequence[Made], fault: Fault | None) -> Any:
        """Shape an answer."""
        return {
            "request_id": "1",
            "model": NAME,
            "created": 1,
            "choices": [self.choice(completion) for completion in made],
            "prompt_logprobs": None,
            "prompt_token_ids": [0] if fault is Fault.OTHER_PROMPT else asked.prompt,
        }

    def choice(self, completion: Made) -> dict[str, Any]:
        """Shape one choice."""
        return {
            "index": completion.index,
            "logprobs": {
                "content": [self.item(*pair) for pair in zip(completion.ids, completion.logprobs, strict=False)]
            },
            "finish_reason": completion.finish_reason,
            "token_ids": completion.ids,
            "routed_experts": None,
        }

    def item(self, token: int, logprob: float) -> dict[str, Any]:
        """Shape one logprob."""
        reported = {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
        return reported | {"top_logprobs": [reported]}


class VllmTokens032(VllmTokens031):
    """vLLM 0.32: version spans, token ids beside logprobs."""

    def choice(self, completion: Made) -> dict[str, Any]:
        """Shape one choice."""
        return super().choice(completion) | {"weight_versions": self.spans(completion)}

    def item(self, token: int, logprob: float) -> dict[str, Any]:
        """Shape one logprob."""
        return {"token_id": token, "logprob": logprob, "rank": 1}


class Sglang(ShapedEngine):
    """SGLang with version spans."""

    prefix = "sglang+"
    info = "/model_info"

    def routes(self) -> list[Route]:
        """Serve generate and the label of the weights."""
        return [Route("/generate", self.generate, methods=["POST"]), Route(self.info, self._model_info)]

    def asked(self, body: dict[str, Any]) -> Asked:
        """Read a request: one prompt for n completions, or a batch with parameters for each."""
        parameters = body["sampling_params"]
        if isinstance(parameters, list):
            return Asked(
                body["input_ids"][0], [completion["sampling_seed"] for completion in parameters], parameters[0]
            )
        return Asked(body["input_ids"], [None] * parameters["n"], parameters)

    def answer(self, asked: Asked, made: Sequence[Made], fault: Fault | None) -> Any:
        """Shape an answer: a list, except for one completion of one prompt."""
        prompt_tokens = 99 if fault is Fault.OTHER_PROMPT else len(asked.prompt)
        outputs = [
            {
                "text": "",
                "output_ids": completion.ids,
                "meta_info": self.meta(completion) | {"prompt_tokens": prompt_tokens},
            }
            for completion in made
        ]
        return outputs[0] if len(outputs) == 1 and asked.seeds == [None] else outputs

    def meta(self, completion: Made) -> dict[str, Any]:
        """Shape the meta information of one completion."""
        return {
            "id": "1",
            "finish_reason": {"type": completion.finish_reason},
            "completion_tokens": len(completion.ids),
            "output_token_logprobs": [
                [pair[1], pair[0], None] for pair in zip(completion.ids, completion.logprobs, strict=False)
            ],
            "weight_version": self.version,
            "weight_versions": self.spans(completion),
        }

    async def _model_info(self, request: Request) -> Response:
        return self.refusal(request) or JSONResponse({"model_path": "/m", "weight_version": self.version})


class SglangWithoutSpans(Sglang):
    """Older SGLang: only the label at the end, and the older name of its model call."""

    info = "/get_model_info"

    def meta(self, completion: Made) -> dict[str, Any]:
        """Shape the meta information of one completion."""
        reported = super().meta(completion)
        del reported["weight_versions"]
        return reported


def _consecutive(seed: int | None, n: int) -> list[int | None]:
    """Return the seeds of n completions, as vLLM derives them."""
    return [None if seed is None else seed + index for index in range(n)]
