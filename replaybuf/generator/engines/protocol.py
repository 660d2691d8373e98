"""What an engine is asked for and what it answers, whatever API it speaks."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Protocol

from replaybuf.generator.engines.load import Load
from replaybuf.wire.group import Bools, Float32s, Int32s

SEED_BITS = 53
"""Exact in every JSON reader, and n seeds in a row from it still fit 64 bits."""
ABORTED = "abort"
"""Finish reason of a completion that the server ended, mostly to load weights; what was sampled until then is right."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample: `n` completions of one prompt, each at most `max_tokens` long, at `temperature` >= 0.

    `stop_token_ids` end a completion, and are part of it, beside those the engine knows by itself. `seed`: where the
    engine's randomness starts, None = it chooses; the n completions differ all the same. Nothing else changes the
    distribution: top-p, top-k, min-p and penalties are switched off in every request, whatever the model's folder says.
    """

    n: int
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def record(self) -> dict[str, Any]:
        """Return what goes into a group's metadata; no seed where none was given."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.seed is None:
            del fields["seed"]
        return fields


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """The n completions of one prompt, as columns.

    - `completion_ids` int32 [C], `completion_lengths` int32 [n], `inference_logprobs` float32 [C] in nats
    - `version_spans` int32 [k, 4]: rollout, policy version, first completion token, one past the last
    - `finish_reasons` one per completion; `metadata`: who sampled, and how
    - `exact`: the spans are the truth; else the server changed its version meanwhile and does not tell what came after,
      and the older version is stamped over the whole completion
    - `completion_mask` bool [C]: False where an environment wrote a token; None = all were sampled
    """

    completion_ids: Int32s
    completion_lengths: Int32s
    inference_logprobs: Float32s
    version_spans: Int32s
    finish_reasons: tuple[str | None, ...]
    metadata: dict[str, Any]
    exact: bool = True
    completion_mask: Bools | None = None

    @property
    def aborted(self) -> bool:
        """Whether a completion was aborted; one that was may have no tokens."""
        return ABORTED in self.finish_reasons

    @property
    def policy_version(self) -> int:
        """Version that sampled the oldest token."""
        return int(self.version_spans[:, 1].min())

    @property
    def completions(self) -> list[Int32s]:
        """Token ids of each completion, int32 [T]; views."""
        ends = self.completion_lengths.cumsum().tolist()
        return [self.completion_ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class Engine(Protocol):
    """Whatever samples completions."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample `sampling.n` completions of one prompt, int32 [P]; some may come aborted.

        Raises `EngineFault` where this request got no usable answer, `EngineAway` (a kind of it) where another try may
        help, `EngineUnfit` where only an operator can.
        """

    async def aclose(self) -> None:
        """Close the connections."""


class Server(Engine, Protocol):
    """One engine process behind an address; `max_model_len` in tokens, both None until `prepare` where not known."""

    url: str
    model: str | None
    max_model_len: int | None
    logprobs_mode: str

    async def healthy(self) -> bool:
        """Say whether the server takes requests."""

    async def loaded_version(self) -> int | None:
        """Ask for the policy version of the weights loaded now; None where the server does not tell."""

    async def tokenized(self, text: str) -> list[int] | None:
        """Encode a text by the server's own tokenizer, without special tokens; None where it does not tell."""

    async def load(self) -> Load | None:
        """Ask how many rollouts run and wait there; None where the server does not tell. Raises `EngineFault`."""

    async def prepare(self) -> None:
        """Learn what the server serves and offers; to be repeated when it may have been started anew.

        Raises `EngineUnfit` where it serves another model, `EngineAway` where it does not answer.
        """


def request_seed(run_seed: int, prompt_index: int, attempt: int) -> int:
    """Derive the seed of one request, in [0, 2**53): the same on every machine, another one for every attempt."""
    digest = hashlib.blake2b(f"{run_seed}:{prompt_index}:{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
