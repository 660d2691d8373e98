"""Client of vLLM 0.31 to 0.33 and compatible servers: `/inference/v1/generate`, else `/v1/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from replaybuf.errors import EngineAway, EngineUnfit, counted
from replaybuf.generator.engines.choices import ABSENT_LOGPROB, Choice, Span, TokenId, in_order
from replaybuf.generator.engines.connection import METHOD_NOT_ALLOWED, NOT_FOUND
from replaybuf.generator.engines.http import UNCHANGED_DISTRIBUTION, Answer, HttpEngine
from replaybuf.generator.engines.protocol import ABORTED, Sampling
from replaybuf.wire.group import Float32s, Int32s
from replaybuf.wire.group_check import LOGPROB_TOLERANCE

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
TOKENS = "/inference/v1/generate"
"""Token ids in and out; needs `vllm serve --enable-scale-out`. Since 0.32 it reports version spans per choice."""
_TOKEN_PREFIX = "token_id:"
_GREEDY_BELOW = 1e-5
"""vLLM treats lower temperatures as 0."""


class _WeightInfo(msgspec.Struct):
    weight_version: int | str


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float]


class _CompletionChoice(msgspec.Struct):
    index: int
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _CompletionLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Completion(msgspec.Struct):
    choices: list[_CompletionChoice]
    model: str | None = None


class _TokenLogprob(msgspec.Struct, gc=False):
    """`token` up to 0.31 ("token_id:62"), `token_id` from 0.32 on."""

    logprob: float
    token: str | None = None
    token_id: int | None = None


class _TokenLogprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _TokensChoice(msgspec.Struct):
    index: int
    token_ids: list[TokenId] | None = None
    logprobs: _TokenLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Tokens(msgspec.Struct):
    choices: list[_TokensChoice]
    model: str | None = None
    prompt_token_ids: list[int] | None = None


class _GivenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _ScoredChoice(msgspec.Struct):
    """`prompt_logprobs`: one entry per prompt token by its id, None for the first; it alone where aborted."""

    index: int
    finish_reason: str | None = None
    prompt_logprobs: list[dict[TokenId, _GivenLogprob] | None] | None = None


class _Scored(msgspec.Struct):
    choices: list[_ScoredChoice]


class VllmEngine(HttpEngine):
    """Client of one vLLM server; `prepare` finds out which of the two calls it offers, `COMPLETIONS` until then."""

    LOGPROBS_MODE = "raw_logprobs"
    _NO_VERSION = "neither weight_versions per choice nor GET /weight_info; start vLLM with VLLM_SERVER_DEV_MODE=1"
    _GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    _offers_tokens = False

    async def prepare(self) -> None:
        """Read the model, its longest context and the offered calls; see `Server.prepare`."""
        await super().prepare()
        # An offered call answers GET with 405, at no cost in tokens.
        reply = await self._connection.send("GET", TOKENS, accepted=(NOT_FOUND, METHOD_NOT_ALLOWED))
        self._offers_tokens = reply.status == METHOD_NOT_ALLOWED

    async def load_weights(self, folder: Path, version: int) -> None:
        """Replace the weights by those of a model folder, which the server reads itself, and label them.

        Only for a server that serves nobody else. It stays paused after a fault that leaves its weights in doubt.
        Raises as `generate`.
        """
        await self._command("/pause?mode=wait")
        try:
            await self._command("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(folder)})
        except EngineUnfit:  # a server without this call has changed nothing
            await self._command("/resume")
            raise
        await self._command("/update_weight_version", new_version=str(version))
        await self._command("/resume")

    async def _command(self, path: str, **body: Any) -> None:
        content = msgspec.json.encode(body) if body else None
        await self._connection.send("POST", path, content, timeout_s=self._timeout_s)

    async def logprobs_of(self, sequences: Sequence[Int32s]) -> list[Float32s]:
        """Return the logprob of every given token, at temperature 1: int32 [T] to float32 [T] in nats per sequence.

        NaN where the server gave none, as for the first token. A sequence may have `max_model_len` - 1 tokens, because
        vLLM always generates one. Raises as `generate`, and `EngineAway` (`engine_aborted`) where the server aborted
        the request to load weights.
        """
        question = self._with_model(
            {"prompt": [ids.tolist() for ids in sequences], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        )
        scored = await self._ask_completions(question, _Scored)
        try:
            choices = in_order(scored.choices, len(sequences))
        except ValueError as error:
            raise self._connection.bad_answer(str(error)) from None
        if any(choice.finish_reason == ABORTED for choice in choices):
            raise EngineAway("engine_aborted", f"engine {self.url} aborted the request", name="engine", value=self.url)
        return [self._prompt_logprobs(choice, ids) for choice, ids in zip(choices, sequences, strict=True)]

    def _prompt_logprobs(self, choice: _ScoredChoice, ids: Int32s) -> Float32s:
        entries = choice.prompt_logprobs or []
        if len(entries) != len(ids):
            raise self._connection.bad_answer(
                f"{counted(len(entries), 'prompt_logprob')} for {counted(len(ids), 'token')}"
            )
        sampled = [(entry or {}).get(token) for token, entry in zip(ids.tolist(), entries, strict=True)]
        values = np.array([np.nan if entry is None else entry.logprob for entry in sampled], np.float64)
        usable = (values > ABSENT_LOGPROB) & (values <= LOGPROB_TOLERANCE)
        return np.where(usable, values, np.nan).astype(np.float32)

    async def _complete(self, prompt: list[int], sampling: Sampling) -> Answer:
        ask = self._by_tokens if self._offers_tokens else self._by_completions
        if sampling.temperature >= _GREEDY_BELOW or sampling.n == 1:
            return await ask(prompt, sampling)
        # All n completions would be equal, and vLLM refuses n > 1 for greedy sampling.
        answer = await ask(prompt, dataclasses.replace(sampling, n=1))
        copies = [dataclasses.replace(choice, index=n) for n in range(sampling.n) for choice in answer.choices]
        return dataclasses.replace(answer, choices=copies)

    async def _weight_label(self) -> int | str | None:
        # vLLM has one label per server and ignores the parameter; the engine of replaybuf has one per adapter.
        query = f"?model={quote(self.model or '', safe='')}" if self._is_adapter else ""
        reply = await self._connection.send("GET", f"/weight_info{query}", accepted=(NOT_FOUND,))
        return None if reply.status == NOT_FOUND else self._connection.decode(reply, _WeightInfo).weight_version

    async def _by_tokens(self, prompt: list[int], sampling: Sampling) -> Answer:
        question = self._with_model(
            {"token_ids": prompt, "sampling_params": _parameters(sampling), "return_token_ids": True}
        )
        content = msgspec.json.encode(question)
        reply = await self._connection.send("POST", TOKENS, content, timeout_s=self._timeout_s, accepted=(NOT_FOUND,))
        if reply.status == NOT_FOUND:
            self._offers_tokens = self._reports_spans = False
            detail = f"engine {self.url} no longer offers {TOKENS}, or not for model {self.model!r}"
            raise EngineAway("engine_restarted", detail, name="engine", value=self.url)
        answer = self._connection.decode(reply, _Tokens)
        self._check_prompt(answer.prompt_token_ids, prompt)
        return Answer([self._tokens_choice(choice) for choice in answer.choices], TOKENS, answer.model)

    def _tokens_choice(self, choice: _TokensChoice) -> Choice:
        items = (choice.logprobs.content if choice.logprobs else None) or []
        token_ids = choice.token_ids or []
        if len(items) == len(token_ids) and not _belong(items, token_ids):
            raise self._connection.bad_answer("logprobs of other tokens than token_ids")
        logprobs = [item.logprob for item in items]
        return Choice(choice.index, token_ids, logprobs, choice.finish_reason, choice.weight_versions)

    async def _by_completions(self, prompt: list[int], sampling: Sampling) -> Answer:
        question = self._with_model({"prompt": prompt, **_parameters(sampling), "return_token_ids": True})
        answer = await self._ask_completions(question, _Completion)
        choices = []
        for choice in answer.choices:
            self._check_prompt(choice.prompt_token_ids, prompt)
            logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
            ids = choice.token_ids or []
            choices.append(Choice(choice.index, ids, logprobs, choice.finish_reason, choice.weight_versions))
        return Answer(choices, COMPLETIONS, answer.model)

    async def _ask_completions(self, question: dict[str, Any], shape: type[T]) -> T:
        accepted = (NOT_FOUND,) if self._is_adapter else ()
        content = msgspec.json.encode(question)
        reply = await self._connection.send("POST", COMPLETIONS, content, timeout_s=self._timeout_s, accepted=accepted)
        if reply.status == NOT_FOUND:  # a restarted server has no adapters until the trainer loads them again
            detail = f"engine {self.url} no longer serves adapter {self.model!r}: {reply.excerpt!r}"
            raise EngineAway("engine_away", detail, name="engine", value=self.url)
        return self._connection.decode(reply, shape)

    def _with_model(self, question: dict[str, Any]) -> dict[str, Any]:
        return question if self.model is None else {"model": self.model, **question}

    def _check_prompt(self, echoed: list[int] | None, prompt: list[int]) -> None:
        if echoed is not None and echoed != prompt:
            raise self._connection.bad_answer("completions of another prompt than the one sent")


def _belong(items: list[_TokenLogprob], token_ids: list[int]) -> bool:
    """Return whether logprobs are those of these tokens, one each."""
    if items and items[0].token_id is not None:
        return [item.token_id for item in items] == token_ids
    return [item.token for item in items] == [f"{_TOKEN_PREFIX}{token}" for token in token_ids]


def _parameters(sampling: Sampling) -> dict[str, Any]:
    # logprobs 0: only that of the sampled token, no alternatives
    return sampling.record() | UNCHANGED_DISTRIBUTION | {"logprobs": 0}
