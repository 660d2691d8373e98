"""Inference engines: token ids in, n sampled completions with logprobs and the versions that sampled them out.

`open_engine` makes the client of one server; `replaybuf.generator.fleet` joins several.
"""

from replaybuf.generator.engines.addresses import open_engine
from replaybuf.generator.engines.load import Load
from replaybuf.generator.engines.protocol import Engine, Sample, Sampling, Server, request_seed
from replaybuf.generator.engines.sglang import SglangEngine
from replaybuf.generator.engines.vllm import VllmEngine

__all__ = [
    "Engine",
    "Load",
    "Sample",
    "Sampling",
    "Server",
    "SglangEngine",
    "VllmEngine",
    "open_engine",
    "request_seed",
]
