"""Read turns, in token ids, from responses of OpenAI-compatible servers."""

from __future__ import annotations

from typing import Any

import msgspec

from replaybuf.errors import GroupRejected

_ASK = 'send extra_body={"return_token_ids": True} and logprobs, without streaming, to vLLM'


class ServerTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a response: what the server read, what it sampled, and the logprobs of the latter in nats.

    `versions`: policy versions as the server reported them, in spans; None if it reports none.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    text: str = ""
    versions: list[tuple[int, int, int]] | None = None


def read_turns(response: Any) -> list[ServerTurn]:
    """Return the turns of a response by index, from chat completions or completions, as an object or a dict.

    The request needs `logprobs` (chat: True, completions: 0) and vLLM's `return_token_ids`: text that is encoded again
    may give other tokens than those sampled. Raises `GroupRejected` for a response that lacks them.
    """
    body = response if isinstance(response, dict) else response.model_dump()
    choices = sorted(_needed(body, "choices", "choices"), key=lambda choice: int(choice.get("index", 0)))
    return [_turn(body, choice, f"choices[{number}]") for number, choice in enumerate(choices)]


def _turn(body: dict[str, Any], choice: dict[str, Any], path: str) -> ServerTurn:
    prompt_ids = choice.get("prompt_token_ids") or _needed(body, "prompt_token_ids", "prompt_token_ids")
    logprobs = _needed(choice, "logprobs", f"{path}.logprobs")
    if logprobs.get("token_logprobs") is not None:
        values = list(logprobs["token_logprobs"])
    else:
        values = [item["logprob"] for item in _needed(logprobs, "content", f"{path}.logprobs.content")]
    message = choice.get("message") or {}
    return ServerTurn(
        prompt_ids=list(prompt_ids),
        token_ids=list(_needed(choice, "token_ids", f"{path}.token_ids")),
        logprobs=[float("nan") if value is None else value for value in values],
        finish_reason=choice.get("finish_reason"),
        text=choice.get("text") or message.get("content") or "",
        versions=_versions(choice.get("weight_versions"), path),
    )


def _versions(spans: list[dict[str, Any]] | None, path: str) -> list[tuple[int, int, int]] | None:
    """Read version spans; the label `default` is version 0."""
    if not spans:
        return None
    try:
        labels = [0 if span["version"] == "default" else int(span["version"]) for span in spans]
    except ValueError as error:
        bound = "labels that are policy versions: set them when weights are loaded"
        detail = f"{path}.weight_versions: {error}; needed: {bound}"
        raise GroupRejected("bad_version_spans", detail, name=f"{path}.weight_versions", bound=bound) from None
    return [(label, span["start"], span["end"]) for label, span in zip(labels, spans, strict=True)]


def _needed(body: dict[str, Any], key: str, path: str) -> Any:
    if body.get(key) is None:
        detail = f"the response has no {path}; {_ASK}"
        raise GroupRejected("length_mismatch", detail, name=path, value=None, bound=_ASK)
    return body[key]
