"""Clients of inference engines: token ids in, sampled completions with logprobs and policy versions out.

`open_engine` makes the client of one server; `replaybuf.generator.fleet` uses several as one.
"""

from __future__ import annotations

from replaybuf.generator.engines.protocol import Engine, Load, Sample, Sampler, Sampling, Server, request_seed
from replaybuf.generator.engines.sglang import SglangEngine
from replaybuf.generator.engines.vllm import VllmEngine

__all__ = [
    "Engine",
    "Load",
    "Sample",
    "Sampler",
    "Sampling",
    "Server",
    "SglangEngine",
    "VllmEngine",
    "open_engine",
    "request_seed",
]

_SGLANG = "sglang+"


def open_engine(
    address: str,
    *,
    timeout_s: float,
    model: str | None = None,
    logprobs_mode: str | None = None,
    api_key: str | None = None,
) -> Server:
    """Return a client of the server at `http://HOST:PORT` (vLLM's API) or `sglang+http://HOST:PORT` (SGLang's API).

    The other arguments are those of `HttpEngine`. Raises `Invalid` for any other address.
    """
    kind = SglangEngine if address.startswith(_SGLANG) else VllmEngine
    return kind(
        address.removeprefix(_SGLANG), timeout_s=timeout_s, model=model, logprobs_mode=logprobs_mode, api_key=api_key
    )
