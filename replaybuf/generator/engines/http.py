"""What engines behind HTTP have in common: the way from a prompt to checked, stamped columns."""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit
from replaybuf.generator.engines.choices import Choice, Columns, columns, in_order, stamped
from replaybuf.generator.engines.load import Load, read_load
from replaybuf.generator.engines.protocol import Sample, Sampling
from replaybuf.generator.engines.wire import NOT_FOUND, Wire
from replaybuf.wire.group import Int32s

logger = logging.getLogger(__name__)

INITIAL_WEIGHTS = "default"
"""What vLLM and SGLang call their weights until a version is set: those they were started with, version 0."""
LARGEST_VERSION = 2**31 - 1
"""Columns of a group hold versions as int32; a date for a label is beyond it."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """The model that a LoRA adapter adapts; None for a model."""


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Choices as they came; `after`: label of the weights when it was given, None = ask for it."""

    choices: list[Choice]
    api: str
    model: str | None = None
    after: int | str | None = None


class HttpEngine(abc.ABC):
    """One server at `url`; how it is asked is the subclass's.

    The version of a completion is what the server says per choice. Where it does not say, its label is read before and
    after; where the two differ the older one is stamped over the whole completion, never newer than the truth, so
    staleness is never understated, and the sample is not `exact`.

    `timeout_s` bounds one request for completions, `model` None takes the first one served. `logprobs_mode` is written
    down, not set: it is what the server was started with. `api_key` goes as bearer token.
    """

    LOGPROBS_MODE: ClassVar[str]
    """What such a server's logprobs are by default: `raw_logprobs`, or `processed_logprobs` with the temperature in."""
    _NO_VERSION: ClassVar[str]
    _GAUGES: ClassVar[tuple[str, str]]
    """What `GET /metrics` calls the numbers of requests that run and that wait."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        model: str | None = None,
        logprobs_mode: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._wire = Wire(url, api_key)
        self.url = self._wire.url
        self.max_model_len: int | None = None
        self.model = model
        self._timeout_s = timeout_s
        self.logprobs_mode = logprobs_mode or self.LOGPROBS_MODE
        self._labels_choices = False
        self._is_adapter = False

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample completions; see `Engine.generate`."""
        before = None if self._labels_choices else await self.loaded_version()
        answer = await self._complete(prompt_ids.tolist(), sampling)
        choices, joined = self._checked(answer.choices, sampling.n)
        metadata = self._metadata(answer, sampling)
        spans, exact = self._labels(choices), True
        if spans is None:
            version, exact = await self._stamp(before, answer.after, metadata)
            spans = stamped(joined.completion_lengths, version)
        return Sample(
            completion_ids=joined.completion_ids,
            completion_lengths=joined.completion_lengths,
            inference_logprobs=joined.inference_logprobs,
            version_spans=spans,
            finish_reasons=joined.finish_reasons,
            metadata=metadata,
            exact=exact,
        )

    async def healthy(self) -> bool:
        """Say whether the server answers `GET /health`."""
        try:
            await self._wire.send("GET", "/health")
        except EngineFault:
            return False
        return True

    async def tokenized(self, text: str) -> list[int] | None:
        """Ask for the token ids of a text by the server's own tokenizer; see `Server.tokenized`."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            return (await self._wire.ask("POST", "/tokenize", _Tokenized, body)).tokens
        except EngineFault as fault:
            logger.info("tokenizers are not compared: %s", fault)
            return None

    async def loaded_version(self) -> int | None:
        """Ask for the policy version loaded now. Raises `EngineUnfit` where the label is no number."""
        label = await self._weight_label()
        return None if label is None else self._version(label)

    async def load(self) -> Load | None:
        """Ask how many rollouts run and wait; None where the server does not tell. Raises `EngineFault`."""
        reply = await self._wire.send("GET", "/metrics", answers=(NOT_FOUND,))
        if reply.status == NOT_FOUND:
            return None
        try:
            return read_load(reply.content.decode(), *self._GAUGES)
        except ValueError as error:
            raise self._wire.bad_answer(f"metrics that are no numbers: {error}") from error

    async def prepare(self) -> None:
        """Learn the model's name and longest context; see `Server.prepare`."""
        models = (await self._wire.ask("GET", "/v1/models", _Models)).data
        found = next((model for model in models if self.model in (None, model.id)), None)
        if found is None:
            served = [model.id for model in models]
            detail = f"engine {self.url} serves {served}; asked for is {self.model!r}"
            raise EngineUnfit("engine_unfit", detail, name="model", value=self.model, bound=served)
        self.model = found.id
        self.max_model_len = found.max_model_len
        self._is_adapter = found.parent is not None
        self._labels_choices = False

    async def aclose(self) -> None:
        """Close the connections."""
        await self._wire.aclose()

    # ------------------------------------------------------------------ the subclass's

    @abc.abstractmethod
    async def _complete(self, prompt: list[int], sampling: Sampling) -> Answer:
        """Ask for completions."""

    @abc.abstractmethod
    async def _weight_label(self) -> int | str | None:
        """Ask what the weights loaded now are called; None where the server does not tell."""

    # ------------------------------------------------------------------ reading

    def _checked(self, choices: Sequence[Choice], n: int) -> tuple[list[Choice], Columns]:
        ordered, flaw = in_order(choices, n)
        flaw = flaw or next(filter(None, (choice.flaw() for choice in ordered)), None)
        if flaw is not None:
            raise self._wire.bad_answer(flaw)
        try:
            return ordered, columns(ordered)
        except ValueError as error:
            raise self._wire.bad_answer(str(error)) from None

    def _labels(self, choices: Sequence[Choice]) -> Int32s | None:
        """Read the server's own version spans; None where it gives none."""
        sampled = [choice for choice in choices if choice.token_ids]  # not so where one was aborted in the queue
        if sampled:
            self._labels_choices = all(choice.spans is not None for choice in sampled)
            if not self._labels_choices:
                return None
        spans = [
            (choice.index, self._version(span.version), span.start, span.end)
            for choice in sampled
            for span in choice.spans or ()
            if span.end > span.start
        ]
        return np.array(spans, np.int32).reshape(-1, 4)

    async def _stamp(self, before: int | None, label: int | str | None, metadata: dict[str, Any]) -> tuple[int, bool]:
        """Return the older of the versions before and after, and whether they agree; if not both are written down."""
        after = await self.loaded_version() if label is None else self._version(label)
        if after is None:
            detail = f"engine {self.url} tells no policy version: {self._NO_VERSION}"
            raise EngineUnfit("engine_unfit", detail, name="engine", value=self.url)
        if before is None:  # it labelled its choices until now: another server has come up at this address
            raise EngineAway("engine_restarted", f"engine {self.url} no longer labels its choices", name="engine")
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
                f"engine {self.url} calls its weights {label!r}; needed is the policy version, a number from 0 to "
                f"{LARGEST_VERSION}"
            )
            raise EngineUnfit("engine_unfit", detail, name="weight_version", value=label, bound=LARGEST_VERSION)
        return version

    def _metadata(self, answer: Answer, sampling: Sampling) -> dict[str, Any]:
        return {
            "engine": {
                "url": self.url,
                "api": answer.api,
                "model": answer.model or self.model,
                "logprobs_mode": self.logprobs_mode,
            },
            "sampling": sampling.record(),
        }
