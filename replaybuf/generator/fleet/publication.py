"""What a publication of weights does to rollouts in flight: pure rules, and how interrupted rollouts are joined.

Whoever loads weights pauses an engine first; `--on-publish` names how, and what becomes of what was running::

    policy             engines are paused by   what was running               taken are completions of
    drain              mode=wait               finishes with the old weights  one version each
    in-flight          mode=keep               goes on with the new weights   any versions, told by spans
    abort-and-resume   mode=abort              is continued from its tokens   any versions, told by spans
    abort              mode=abort              is sampled anew                one version each
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from replaybuf.errors import EngineFault
from replaybuf.generator.engines.protocol import ABORTED, SEED_BITS, Sample, Sampling
from replaybuf.wire.group import Float32s, Int32s

OnPublish: TypeAlias = Literal["drain", "in-flight", "abort-and-resume", "abort"]
SUPERSEDED = "superseded"
"""Given back with this reason, a ticket counts as no failed attempt of its prompt."""


def refusal(on_publish: OnPublish, sample: Sample) -> tuple[str, str] | None:
    """Say why a sample has to be made anew under a policy, as (reason, detail); None where it may be used.

    - `engine_aborted`: it holds an aborted completion, and those are continued under `abort-and-resume` alone.
    - `engine_version_changed`: the server tells no spans and its version changed meanwhile, so nobody knows which
      version sampled what. In flight the older one is stamped, never newer than the truth; the other policies let no
      completion run across a publication, so asking again is answered with one version.
    - `engine_version_changed`, too: two versions in one completion where the policy promises one.
    """
    if sample.aborted and on_publish != "abort-and-resume":
        return "engine_aborted", "aborted the completion"
    if not sample.exact and on_publish != "in-flight":
        return "engine_version_changed", "changed its version meanwhile and tells no spans"
    whole = on_publish in ("drain", "abort")
    mixed = len(sample.version_spans) > len(sample.completion_lengths)
    if whole and mixed and any(len(piece.spans) > 1 for piece in pieces(sample)):
        return "engine_version_changed", f"sampled one completion with two versions; on_publish is {on_publish}"
    return None


def stale(version: int | None, published: int | None) -> bool:
    """Say whether an engine missed a publication: engines are loaded before a version is announced.

    None = not told; then nothing is.
    """
    return version is not None and published is not None and version < published


def ahead(version: int | None, published: int | None) -> bool:
    """Say whether an engine has what this run is not about to publish: weights of another run, or of before a rewind.

    One above the published version is normal: engines are loaded first. None = not told; then nothing is.
    """
    return version is not None and published is not None and version > published + 1


def doomed(oldest: int, published: int | None, max_staleness: int | None) -> bool:
    """Say whether a group whose oldest token is of version `oldest` can be in no batch any more.

    version(s) >= published for every step s to come, so staleness >= published - oldest. None = unknown, unbounded.
    """
    return published is not None and max_staleness is not None and published - oldest > max_staleness


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens of one rollout that follow one another, T >= 0 of them.

    `token_ids` int32 [T], `logprobs` float32 [T] in nats, `spans` int32 [k, 3]: version, first token, one past the
    last; neighbours differ in version. `finish_reason` of the last token.
    """

    token_ids: Int32s
    logprobs: Float32s
    spans: Int32s
    finish_reason: str | None

    def __len__(self) -> int:
        return len(self.token_ids)

    def followed_by(self, later: Piece) -> Piece:
        """Join with what was sampled after this.

        Raises `EngineFault` (`superseded`) where versions fall: a rewind took back the weights that sampled this.
        """
        if len(self) and len(later) and later.spans[0, 0] < self.spans[-1, 0]:
            raise EngineFault(
                SUPERSEDED,
                f"version {later.spans[0, 0]} would continue tokens of version {self.spans[-1, 0]}",
                name="policy_version",
                value=int(later.spans[0, 0]),
                bound=int(self.spans[-1, 0]),
            )
        return Piece(
            np.concatenate([self.token_ids, later.token_ids]),
            np.concatenate([self.logprobs, later.logprobs]),
            _merged(np.concatenate([self.spans, later.spans + np.array([0, len(self), len(self)], np.int32)])),
            later.finish_reason,
        )


def pieces(sample: Sample) -> list[Piece]:
    """Split a sample into its n rollouts."""
    ends = np.cumsum(sample.completion_lengths)[:-1]
    ids, logprobs = np.split(sample.completion_ids, ends), np.split(sample.inference_logprobs, ends)
    rollouts = sample.version_spans[:, 0]
    return [
        Piece(ids[index], logprobs[index], _merged(sample.version_spans[rollouts == index, 1:]), reason)
        for index, reason in enumerate(sample.finish_reasons)
    ]


def joined(rollouts: Sequence[Piece], metadata: dict[str, Any]) -> Sample:
    """Make a sample of its rollouts, n >= 1."""
    spans = [np.insert(piece.spans, 0, index, axis=1) for index, piece in enumerate(rollouts)]
    return Sample(
        completion_ids=np.concatenate([piece.token_ids for piece in rollouts]),
        completion_lengths=np.array([len(piece) for piece in rollouts], np.int32),
        inference_logprobs=np.concatenate([piece.logprobs for piece in rollouts]),
        version_spans=np.concatenate(spans).astype(np.int32),
        finish_reasons=tuple(piece.finish_reason for piece in rollouts),
        metadata=metadata,
    )


def remainder(sampling: Sampling, rollout: int, piece: Piece) -> Sampling:
    """Return how to sample the rest of one rollout: what is left of its length, with a seed of its own.

    The first seed again would draw the numbers again that drew the first tokens.
    """
    seed = sampling.seed
    if seed is not None:
        digest = hashlib.blake2b(f"{seed}:{rollout}:{len(piece)}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> (64 - SEED_BITS)
    return dataclasses.replace(sampling, n=1, max_tokens=sampling.max_tokens - len(piece), seed=seed)


def unfinished(piece: Piece, sampling: Sampling) -> bool:
    """Say whether a rollout is to be continued: aborted, with room left."""
    return piece.finish_reason == ABORTED and len(piece) < sampling.max_tokens


def finished(piece: Piece) -> Piece:
    """Return a rollout as ended; one that was aborted at its last token is as long as it may be."""
    return dataclasses.replace(piece, finish_reason="length") if piece.finish_reason == ABORTED else piece


def _merged(spans: Int32s) -> Int32s:
    """Drop empty spans and join neighbours of one version; int32 [k, 3] both."""
    spans = spans[spans[:, 2] > spans[:, 1]]
    if not len(spans):
        return spans
    starts = np.flatnonzero(np.append(True, spans[1:, 0] != spans[:-1, 0]))
    merged = spans[starts]
    merged[:, 2] = spans[np.append(starts[1:], len(spans)) - 1, 2]
    return merged
