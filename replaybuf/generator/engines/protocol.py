"""The contract of an inference engine: what a request holds and what an answer holds, for every API."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Protocol

from replaybuf.wire.group import Int32s
from replaybuf.wire.text.pieces import Completions

SEED_BITS = 53
"""Every JSON reader keeps 53 bits exactly, and seed + n still fits in 64 bits."""
ABORTED = "abort"
"""Finish reason of a completion that the server ended early, mostly to load weights; its tokens are valid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters: `n` completions of one prompt, at most `max_tokens` each, at `temperature` >= 0.

    A completion ends with a token of `stop_token_ids` (included) or of the engine's own stop tokens. `seed` None: the
    engine chooses; the n completions differ in both cases. Every request switches off top-p, top-k, min-p and
    penalties, whatever the model folder says.
    """

    n: int
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def record(self) -> dict[str, Any]:
        """Return the fields for a group's metadata, without `seed` where it is None."""
        fields: dict[str, Any] = {
            "n": self.n,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop_token_ids": self.stop_token_ids,
        }
        return fields if self.seed is None else fields | {"seed": self.seed}


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample(Completions):
    """The completions of one request.

    - `metadata`: engine and sampling parameters
    - `exact`: False where the server changed its version during the request and reports no spans; then the older
      version covers the whole completion
    """

    metadata: dict[str, Any]
    exact: bool = True

    @property
    def aborted(self) -> bool:
        """Whether a completion was aborted; an aborted completion may have no tokens."""
        return ABORTED in self.finish_reasons


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Rollouts on one server, of all its clients: `running` are being sampled, `waiting` are queued."""

    running: int
    waiting: int


class Sampler(Protocol):
    """Samples completions."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample `sampling.n` completions of one prompt, int32 [P]; completions may come back aborted.

        Raises `EngineAway` where another try may help, `EngineUnfit` where only an operator can help, and otherwise
        `EngineFault`, the parent of both, for this request.
        """


class Engine(Sampler, Protocol):
    """Samples completions until it is closed."""

    async def aclose(self) -> None:
        """Close the connections."""


class Server(Engine, Protocol):
    """One engine process at an address; `model` and `max_model_len` (tokens) may be None until `prepare`."""

    url: str
    model: str | None
    max_model_len: int | None
    logprobs_mode: str

    async def healthy(self) -> bool:
        """Return whether the server takes requests."""

    async def loaded_version(self) -> int | None:
        """Return the policy version of the loaded weights; None where the server does not report it."""

    async def tokenize(self, text: str) -> list[int] | None:
        """Encode a text with the server's tokenizer, without special tokens; None where it has no such call."""

    async def load(self) -> Load | None:
        """Return how many rollouts run and wait; None where the server has no such gauges. Raises `EngineFault`."""

    async def prepare(self) -> None:
        """Read what the server serves and offers; call it again when the server may have restarted.

        Raises `EngineUnfit` where it serves another model, `EngineAway` where it does not answer.
        """


def derived_seed(*parts: int) -> int:
    """Derive a seed in [0, 2**53) from numbers; the result is the same on every machine."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def request_seed(run_seed: int, prompt_index: int, attempt: int, reissue: int = 0) -> int:
    """Derive the seed of one request, in [0, 2**53); every attempt at a prompt and every reissue gets another seed."""
    return derived_seed(run_seed, prompt_index, attempt, *([reissue] if reissue else []))
