"""Client of SGLang's own API, `POST /generate`."""

from __future__ import annotations

from typing import Any

import msgspec

from replaybuf.errors import counted
from replaybuf.generator.engines.choices import Choice, Span, TokenId
from replaybuf.generator.engines.connection import NOT_FOUND
from replaybuf.generator.engines.http import UNCHANGED_DISTRIBUTION, Answer, HttpEngine
from replaybuf.generator.engines.protocol import Sampling

GENERATE = "/generate"
_MODEL_INFO = ("/model_info", "/get_model_info")
"""The newer name first."""


class _TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """(logprob, token id, text or null)."""

    logprob: float
    token_id: TokenId


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    prompt_tokens: int | None = None
    output_token_logprobs: list[_TokenLogprob] | None = None
    weight_version: int | str | None = None
    weight_versions: list[Span] | None = None


class _Output(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[TokenId] | None = None


_OUTPUTS: Any = list[_Output] | _Output
"""A single completion of a single prompt comes without a list."""


class _ModelInfo(msgspec.Struct):
    weight_version: int | str | None = None


class SglangEngine(HttpEngine):
    """Client of one SGLang server.

    Its logprobs contain the temperature unless the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`. Seeds have an
    effect only with `--enable-deterministic-inference`. Newer servers report `weight_versions` per completion; older
    servers report only the label at the end.
    """

    LOGPROBS_MODE = "processed_logprobs"
    _GAUGES = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
    _NO_VERSION = "neither meta_info.weight_version nor GET /model_info has one"

    async def _complete(self, prompt: list[int], sampling: Sampling) -> Answer:
        question = _question(prompt, sampling)
        if self._is_adapter:  # the call has no name for the base model
            question["lora_path"] = self.model
        outputs = await self._connection.ask("POST", GENERATE, _OUTPUTS, question, timeout_s=self._timeout_s)
        if isinstance(outputs, _Output):
            outputs = [outputs]
        choices = [self._choice(index, output, len(prompt)) for index, output in enumerate(outputs)]
        labels = [output.meta_info.weight_version for output in outputs]
        reported = [label for label in labels if label is not None]
        # Completions may end on both sides of an update; only the oldest label is safe for all of them.
        oldest = min(reported, key=self._version) if reported and len(reported) == len(labels) else None
        return Answer(choices, GENERATE, label=oldest)

    def _choice(self, index: int, output: _Output, prompt_tokens: int) -> Choice:
        meta = output.meta_info
        if meta.prompt_tokens not in (None, prompt_tokens):
            raise self._connection.bad_answer(
                f"completions of a prompt of {counted(meta.prompt_tokens, 'token')}; the one sent has {prompt_tokens}"
            )
        items = meta.output_token_logprobs or []
        # The token ids beside the logprobs are the sampled ones; `output_ids` may lack the stop token.
        token_ids: list[int] = [item.token_id for item in items]
        if output.output_ids is not None and len(output.output_ids) > len(items):
            token_ids = output.output_ids
        reason = meta.finish_reason.type if meta.finish_reason else None
        return Choice(index, token_ids, [item.logprob for item in items], reason, meta.weight_versions)

    async def _weight_label(self) -> int | str | None:
        for path in _MODEL_INFO:
            reply = await self._connection.send("GET", path, accepted=(NOT_FOUND,))
            if reply.status != NOT_FOUND:
                return self._connection.decode(reply, _ModelInfo).weight_version
        return None


def _question(prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    parameters = UNCHANGED_DISTRIBUTION | {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": sampling.stop_token_ids,
        "no_stop_trim": True,
    }
    question = {"return_logprob": True, "stream": False}
    if sampling.seed is None:
        return question | {"input_ids": prompt, "sampling_params": parameters | {"n": sampling.n}}
    # One seed would make all n completions equal, so a batch of n requests has a seed each.
    seeded = [parameters | {"sampling_seed": sampling.seed + index} for index in range(sampling.n)]
    return question | {"input_ids": [prompt] * sampling.n, "sampling_params": seeded}
