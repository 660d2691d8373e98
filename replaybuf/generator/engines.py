"""Inference engines: token ids in, n sampled completions with logprobs and the versions that sampled them out.

`VllmEngine` speaks to one server of the OpenAI-style API as vLLM serves it; `replaybuf.generator.fleet` joins several.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import httpx
import msgspec
import numpy as np

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, Invalid
from replaybuf.group import Float32s, Int32s

T = TypeVar("T")

INITIAL_WEIGHTS = "default"
"""What vLLM calls its weights until a version is set: those of the folder it was started with, version 0."""

_EXCERPT_CHARS = 200
_KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes an idle connection
_SHORT_TIMEOUT_S = 10.0
"""Bound of the calls that compute nothing."""
_NOT_FOUND = 404
_UNFIT_STATUSES = (401, 403, _NOT_FOUND, 405)
_ABORTED = "abort"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample: `n` completions of one prompt, each at most `max_tokens` long, at `temperature` >= 0.

    `stop_token_ids` end a completion, and are part of it, beside those the engine knows by itself.
    """

    n: int
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """The n completions of one prompt, as columns.

    - `completion_ids` int32 [C], `completion_lengths` int32 [n], `inference_logprobs` float32 [C] in nats
    - `version_spans` int32 [k, 4]: rollout, policy version, first completion token, one past the last
    - `finish_reasons` one per completion; `metadata`: who sampled, and how
    """

    completion_ids: Int32s
    completion_lengths: Int32s
    inference_logprobs: Float32s
    version_spans: Int32s
    finish_reasons: tuple[str | None, ...]
    metadata: dict[str, Any]

    @property
    def policy_version(self) -> int:
        """Version that sampled the oldest token."""
        return int(self.version_spans[:, 1].min())

    @property
    def completions(self) -> list[list[int]]:
        """Token ids of each completion."""
        ends = np.cumsum(self.completion_lengths)
        return [ids.tolist() for ids in np.split(self.completion_ids, ends[:-1])]


class Engine(Protocol):
    """Whatever samples completions."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample `sampling.n` completions of one prompt, int32 [P].

        Raises `EngineFault` where this request got no usable answer, `EngineAway` (a kind of it) where another try may
        help, `EngineUnfit` where only an operator can.
        """

    async def aclose(self) -> None:
        """Close the connections."""


_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Span(msgspec.Struct):
    version: int | str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    model: str | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _WeightInfo(msgspec.Struct):
    weight_version: int | str


class VllmEngine:
    """One vLLM-style server at `url`, by `POST /v1/completions`.

    The version of a completion is what the server says per choice in `weight_versions`. A server that does not say
    (vLLM up to 0.31 on this endpoint) is asked by `GET /weight_info` before and after; where the two differ the older
    one is stamped over the whole completion: never newer than the truth, so staleness is never understated.

    `timeout_s` bounds one request, `model` None takes the first one served. `logprobs_mode` is written down, not set:
    it is what the server was started with.
    """

    def __init__(
        self, url: str, *, timeout_s: float, model: str | None = None, logprobs_mode: str = "raw_logprobs"
    ) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise Invalid(f"engine is {url!r}; needed: http://HOST:PORT", name="engine", value=url)
        self.url = url.rstrip("/")
        self.max_model_len: int | None = None
        self.model = model
        self._timeout_s = timeout_s
        self._logprobs_mode = logprobs_mode
        self._labels_choices = False
        self._context = ssl.create_default_context()
        self._idle: list[httpx.AsyncClient] = []

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample completions; see `Engine.generate`."""
        before = None if self._labels_choices else await self._weight_version()
        question = self._question(prompt_ids, sampling)
        answer = await self._ask("POST", "/v1/completions", _Completion, question, timeout_s=self._timeout_s)
        choices = answer.choices
        self._check(choices, question["prompt"], sampling.n)
        metadata = self._metadata(answer.model, sampling)
        lengths = np.array([len(choice.token_ids or ()) for choice in choices], np.int32)
        spans = self._labels(choices)
        if spans is None:
            spans = await self._stamps(before, lengths, metadata)
        return Sample(
            completion_ids=_joined([choice.token_ids or [] for choice in choices], np.int32),
            completion_lengths=lengths,
            inference_logprobs=_joined([c.logprobs.token_logprobs if c.logprobs else [] for c in choices], np.float32),
            version_spans=spans,
            finish_reasons=tuple(choice.finish_reason for choice in choices),
            metadata=metadata,
        )

    async def healthy(self) -> bool:
        """Say whether the server answers `GET /health`."""
        try:
            await self._send("GET", "/health", None, _SHORT_TIMEOUT_S)
        except EngineFault:
            return False
        return True

    async def prepare(self) -> None:
        """Learn the model's name and longest context. Raises `EngineUnfit` where the server serves another model."""
        models = (await self._ask("GET", "/v1/models", _Models)).data
        found = next((model for model in models if self.model in (None, model.id)), None)
        if found is None:
            served = [model.id for model in models]
            raise EngineUnfit(
                "engine_unfit",
                f"engine {self.url} serves {served}; asked for is {self.model!r}",
                name="model",
                value=self.model,
                bound=served,
            )
        self.model = found.id
        self.max_model_len = found.max_model_len

    async def aclose(self) -> None:
        """Close the connections."""
        while self._idle:
            await self._idle.pop().aclose()

    # ------------------------------------------------------------------ asking

    def _question(self, prompt_ids: Int32s, sampling: Sampling) -> dict[str, Any]:
        question = {
            "prompt": prompt_ids.tolist(),
            "n": sampling.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": sampling.stop_token_ids,
            "logprobs": 0,  # the sampled token's own, no alternatives
            "return_token_ids": True,
        }
        return question if self.model is None else {"model": self.model, **question}

    async def _weight_version(self) -> int | None:
        """Ask which version is loaded; None where the server does not tell."""
        reply = await self._send("GET", "/weight_info", None, _SHORT_TIMEOUT_S, answers=(_NOT_FOUND,))
        if reply.status_code == _NOT_FOUND:
            return None
        return self._version(self._decoded(reply, _WeightInfo).weight_version)

    async def _ask(
        self,
        method: str,
        path: str,
        shape: type[T],
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float = _SHORT_TIMEOUT_S,
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        return self._decoded(await self._send(method, path, content, timeout_s), shape)

    async def _send(
        self, method: str, path: str, content: bytes | None, timeout_s: float, answers: Sequence[int] = ()
    ) -> httpx.Response:
        try:
            async with asyncio.timeout(timeout_s), self._connection() as connection:
                headers = {"content-type": "application/json"} if content else None
                reply = await connection.request(method, self.url + path, content=content, headers=headers)
        except (TimeoutError, httpx.TimeoutException):
            detail = f"engine {self.url}{path} gave no answer within {timeout_s:g} s"
            raise EngineAway("engine_timeout", detail, name="engine", value=self.url, bound=timeout_s) from None
        except httpx.TransportError as error:
            detail = f"engine {self.url}{path}: {str(error) or type(error).__name__}"
            raise EngineAway("engine_away", detail, name="engine", value=self.url) from error
        if reply.is_success or reply.status_code in answers:
            return reply
        raise self._fault(path, reply)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """Lend a connection of its own to one request; one that failed is not used again.

        One client per connection, since httpx walks its whole pool on every request: with 32 in flight that is 2.5 ms
        of this process per request instead of 0.7.
        """
        # The last one returned is the one least likely to have been closed by the server meanwhile.
        connection = self._idle.pop() if self._idle else self._new_connection()
        try:
            yield connection
        except BaseException:
            await connection.aclose()
            raise
        self._idle.append(connection)

    def _new_connection(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_S)
        # Every use is inside `asyncio.timeout`, which bounds the whole and not only each silence.
        return httpx.AsyncClient(limits=limits, verify=self._context, timeout=None)

    def _fault(self, path: str, reply: httpx.Response) -> EngineFault:
        status = reply.status_code
        detail = f"engine {self.url}{path} answered {status}: {_excerpt(reply)!r}"
        fields = {"name": "engine", "value": self.url}
        if status in _UNFIT_STATUSES:
            return EngineUnfit("engine_unfit", detail, **fields)
        if reply.is_server_error or status == httpx.codes.TOO_MANY_REQUESTS:
            return EngineAway("engine_error", detail, **fields)
        return EngineFault("engine_refused", detail, **fields)

    # ------------------------------------------------------------------ reading

    def _decoded(self, reply: httpx.Response, shape: type[T]) -> T:
        try:
            return msgspec.json.decode(reply.content, type=shape)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._bad_answer(f"{error}; it starts with {_excerpt(reply)!r}") from error

    def _check(self, choices: list[_Choice], prompt: list[int], n: int) -> None:
        if len(choices) != n:
            raise self._bad_answer(f"{len(choices)} choices; asked for were {n}")
        for choice in choices:
            if choice.finish_reason == _ABORTED:
                raise EngineAway("engine_aborted", f"engine {self.url} aborted the completion", name="engine")
            if not choice.token_ids:
                raise self._bad_answer("a choice without token_ids")
            logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
            if len(logprobs) != len(choice.token_ids):
                raise self._bad_answer(f"{len(logprobs)} logprobs for {len(choice.token_ids)} tokens")
            if choice.prompt_token_ids is not None and choice.prompt_token_ids != prompt:
                raise self._bad_answer("completions of another prompt than the one sent")

    def _bad_answer(self, what: str) -> EngineFault:
        detail = f"engine {self.url} answered with {what}"
        return EngineFault("engine_bad_answer", detail, name="engine", value=self.url)

    def _labels(self, choices: list[_Choice]) -> Int32s | None:
        """Read the server's own version spans; None where it gives none."""
        self._labels_choices = all(choice.weight_versions is not None for choice in choices)
        if not self._labels_choices:
            return None
        spans = [
            (rollout, self._version(span.version), span.start, span.end)
            for rollout, choice in enumerate(choices)
            for span in choice.weight_versions or ()
        ]
        return np.array(spans, np.int32).reshape(-1, 4)

    async def _stamps(self, before: int | None, lengths: Int32s, metadata: dict[str, Any]) -> Int32s:
        """Stamp whole completions with the older of the versions before and after."""
        after = await self._weight_version()
        if after is None:
            raise EngineUnfit(
                "engine_unfit",
                f"engine {self.url} tells no policy version: neither weight_versions per choice nor GET /weight_info; "
                "start vLLM with VLLM_SERVER_DEV_MODE=1",
                name="engine",
                value=self.url,
            )
        if before is None:  # it labelled its choices until now: another server has come up at this address
            raise EngineAway("engine_restarted", f"engine {self.url} no longer labels its choices", name="engine")
        if before != after:
            metadata["weight_versions"] = {"before": before, "after": after}
        stamps = np.zeros((len(lengths), 4), np.int32)
        stamps[:, 0] = np.arange(len(lengths))
        stamps[:, 1] = min(before, after)
        stamps[:, 3] = lengths
        return stamps

    def _version(self, label: int | str) -> int:
        if label == INITIAL_WEIGHTS:
            return 0
        try:
            return int(label)
        except ValueError:
            detail = f"engine {self.url} calls its weights {label!r}; needed is the policy version, a number"
            raise EngineUnfit("engine_unfit", detail, name="weight_version", value=label) from None

    def _metadata(self, model: str | None, sampling: Sampling) -> dict[str, Any]:
        return {
            "engine": {"url": self.url, "model": model or self.model, "logprobs_mode": self._logprobs_mode},
            "sampling": dataclasses.asdict(sampling),
        }


def _excerpt(reply: httpx.Response) -> str:
    return reply.content[:_EXCERPT_CHARS].decode("utf-8", "replace")


def _joined(lists: Sequence[Sequence[float]], dtype: type[np.generic]) -> Any:
    count = sum(len(values) for values in lists)
    return np.fromiter(itertools.chain.from_iterable(lists), dtype, count)
