"""Shared part of the HTTP engine clients: from a prompt to checked columns with policy versions."""

from __future__ import annotations

import abc
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit
from replaybuf.generator.engines.choices import Choice, in_order, logprobs, token_ids, uniform_spans
from replaybuf.generator.engines.connection import NOT_FOUND, Connection
from replaybuf.generator.engines.protocol import Load, Sample, Sampling
from replaybuf.wire.group import Int32s

logger = logging.getLogger(__name__)

INITIAL_WEIGHTS = "default"
"""Label of vLLM and SGLang for the weights they started with, until somebody sets a version; it means version 0."""
LARGEST_VERSION = 2**31 - 1
"""Group columns hold versions as int32; a date used as label does not fit."""
UNCHANGED_DISTRIBUTION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with every request: the server takes missing values from the model's generation_config.json."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """Base model of a LoRA adapter; None for a model."""


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Choices of one request; `label`: the weights' label at the end of the request, None = ask the server for it."""

    choices: list[Choice]
    api: str
    model: str | None = None
    label: int | str | None = None


class HttpEngine(abc.ABC):
    """Client of one server at `url`; a subclass implements the server's API.

    The server reports the version of each completion, as spans. Where it does not, the client reads the version before
    and after the request. If the two differ, the sample is not `exact` and the older one covers the whole completion,
    so that staleness is never understated.

    `timeout_s` bounds one request for completions. `model` None means the first model served. `logprobs_mode` is only
    recorded: it says how the server was started. `api_key` is the bearer token.
    """

    LOGPROBS_MODE: ClassVar[str]
    """Default of such a server: `raw_logprobs`, or `processed_logprobs` (after temperature)."""
    _NO_VERSION: ClassVar[str]
    _GAUGES: ClassVar[tuple[str, str]]
    """Names in `GET /metrics` of the numbers of running and waiting requests."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        model: str | None = None,
        logprobs_mode: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._connection = Connection(url, api_key)
        self.url = self._connection.url
        self.max_model_len: int | None = None
        self.model = model
        self._timeout_s = timeout_s
        self.logprobs_mode = logprobs_mode or self.LOGPROBS_MODE
        self._reports_spans = False
        self._is_adapter = False

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample completions; see `Engine.generate`."""
        before = None if self._reports_spans else await self.loaded_version()
        answer = await self._complete(prompt_ids.tolist(), sampling)
        try:
            choices = in_order(answer.choices, sampling.n)
            for choice in choices:
                choice.check()
            columns = token_ids(choices), logprobs(choices)
        except ValueError as error:
            raise self._connection.bad_answer(str(error)) from None
        lengths = np.array([len(choice.token_ids) for choice in choices], np.int32)
        metadata = self._metadata(answer, sampling)
        spans, exact = self._reported_spans(choices), True
        if spans is None:
            version, exact = await self._older_version(before, answer.label, metadata)
            spans = uniform_spans(lengths, version)
        return Sample(
            completion_ids=columns[0],
            completion_lengths=lengths,
            inference_logprobs=columns[1],
            version_spans=spans,
            finish_reasons=tuple(choice.finish_reason for choice in choices),
            metadata=metadata,
            exact=exact,
        )

    async def healthy(self) -> bool:
        """Return whether the server answers `GET /health`."""
        try:
            await self._connection.send("GET", "/health")
        except EngineFault:
            return False
        return True

    async def tokenize(self, text: str) -> list[int] | None:
        """Encode a text with the server's tokenizer; see `Server.tokenize`."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            return (await self._connection.ask("POST", "/tokenize", _Tokenized, body)).tokens
        except EngineFault as fault:
            logger.info("skipping the comparison of tokenizers: %s", fault)
            return None

    async def loaded_version(self) -> int | None:
        """Return the loaded policy version; see `Server.loaded_version`. Raises `EngineUnfit` for another label."""
        label = await self._weight_label()
        return None if label is None else self._version(label)

    async def load(self) -> Load | None:
        """Return how many rollouts run and wait; see `Server.load`."""
        reply = await self._connection.send("GET", "/metrics", accepted=(NOT_FOUND,))
        if reply.status == NOT_FOUND:
            return None
        try:
            return read_load(reply.content.decode(), *self._GAUGES)
        except ValueError as error:
            raise self._connection.bad_answer(f"unreadable metrics: {error}") from error

    async def prepare(self) -> None:
        """Read the model's name and longest context; see `Server.prepare`."""
        models = (await self._connection.ask("GET", "/v1/models", _Models)).data
        own_model = next((model for model in models if self.model in (None, model.id)), None)
        if own_model is None:
            served = [model.id for model in models]
            detail = f"engine {self.url} serves {served}; the requested model is {self.model!r}"
            raise EngineUnfit("engine_unfit", detail, name="model", value=self.model, bound=served)
        self.model = own_model.id
        # vLLM gives the context of its models only, not that of their adapters.
        lengths = {model.id: model.max_model_len for model in models}
        self.max_model_len = own_model.max_model_len or lengths.get(own_model.parent or "")
        self._is_adapter = own_model.parent is not None
        self._reports_spans = False

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.aclose()

    # ------------------------------------------------------------------ of the subclass

    @abc.abstractmethod
    async def _complete(self, prompt: list[int], sampling: Sampling) -> Answer:
        """Request completions."""

    @abc.abstractmethod
    async def _weight_label(self) -> int | str | None:
        """Return the label of the loaded weights; None where the server does not report it."""

    # ------------------------------------------------------------------ versions

    def _reported_spans(self, choices: Sequence[Choice]) -> Int32s | None:
        """Return the server's own version spans, int32 [k, 4]; None where it reports none."""
        sampled = [choice for choice in choices if choice.token_ids]  # a choice aborted in the queue has no spans
        if sampled:
            self._reports_spans = all(choice.spans is not None for choice in sampled)
            if not self._reports_spans:
                return None
        spans = [
            (choice.index, self._version(span.version), span.start, span.end)
            for choice in sampled
            for span in choice.spans or ()
            if span.end > span.start
        ]
        return np.array(spans, np.int32).reshape(-1, 4)

    async def _older_version(
        self, before: int | None, label: int | str | None, metadata: dict[str, Any]
    ) -> tuple[int, bool]:
        """Return the older of the versions before and after a request, and whether they agree; record a change."""
        after = await self.loaded_version() if label is None else self._version(label)
        if after is None:
            detail = f"engine {self.url} does not report its policy version: {self._NO_VERSION}"
            raise EngineUnfit("engine_unfit", detail, name="engine", value=self.url)
        if before is None:  # it reported spans until now, so another server has started at this address
            raise EngineAway("engine_restarted", f"engine {self.url} no longer reports version spans", name="engine")
        if before != after:
            metadata["weight_versions"] = {"before": before, "after": after}
        return min(before, after), before == after

    def _version(self, label: int | str) -> int:
        if label == INITIAL_WEIGHTS:
            return 0
        try:
            version = int(label)
        except ValueError:
            version = -1
        if not 0 <= version <= LARGEST_VERSION:
            detail = (
                f"engine {self.url} labels its weights {label!r}; the label must be the policy version, a number from "
                f"0 to {LARGEST_VERSION}"
            )
            raise EngineUnfit("engine_unfit", detail, name="weight_version", value=label, bound=LARGEST_VERSION)
        return version

    def _metadata(self, answer: Answer, sampling: Sampling) -> dict[str, Any]:
        model = answer.model or self.model
        engine = {"url": self.url, "api": answer.api, "model": model, "logprobs_mode": self.logprobs_mode}
        return {"engine": engine, "sampling": sampling.record()}


def read_load(exposition: str, running: str, waiting: str) -> Load | None:
    """Read two gauges from Prometheus text, each summed over its labels; None where one is missing.

    A server with several data-parallel engines has one sample per engine. Raises `ValueError` for an invalid sample.
    """
    # Parsing only these lines keeps the event loop free: a whole exposition of vLLM takes tens of milliseconds.
    starts = tuple(f"{name}{end}" for name in (running, waiting) for end in ("{", " "))
    lines = "".join(f"{line}\n" for line in exposition.splitlines() if line.startswith(starts))
    totals: dict[str, int] = {}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                raise ValueError(f"{sample.name} is {sample.value}")
            totals[sample.name] = totals.get(sample.name, 0) + int(sample.value)
    return Load(totals[running], totals[waiting]) if {running, waiting} <= totals.keys() else None
