"""Which client an engine's address asks for."""

from __future__ import annotations

from replaybuf.generator.engines.protocol import Server
from replaybuf.generator.engines.sglang import SglangEngine
from replaybuf.generator.engines.vllm import VllmEngine

_SGLANG = "sglang+"


def open_engine(
    address: str,
    *,
    timeout_s: float,
    model: str | None = None,
    logprobs_mode: str | None = None,
    api_key: str | None = None,
) -> Server:
    """Make the client of the server at `http://HOST:PORT` (vLLM's API) or `sglang+http://HOST:PORT` (SGLang's own).

    `timeout_s` bounds one request for completions, `model` None takes the first one served, `logprobs_mode` None what
    such a server does by default. Raises `Invalid` for another address.
    """
    kind = SglangEngine if address.startswith(_SGLANG) else VllmEngine
    return kind(
        address.removeprefix(_SGLANG),
        timeout_s=timeout_s,
        model=model,
        logprobs_mode=logprobs_mode or kind.LOGPROBS_MODE,
        api_key=api_key,
    )
