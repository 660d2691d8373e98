"""Effect of a weight publication on rollouts in flight: pure rules, and the joining of interrupted rollouts.

The process that loads weights pauses an engine first. `--on-publish` names the pause mode and what happens to the
rollouts in flight::

    policy             pause mode   rollouts in flight               accepted completions
    drain              wait         finish with the old weights      one version each
    in-flight          keep         continue with the new weights    any versions, recorded as spans
    abort-and-resume   abort        continue from their tokens       any versions, recorded as spans
    abort              abort        are sampled again                one version each
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from replaybuf.errors import GroupAborted
from replaybuf.generator.engines.protocol import ABORTED, Sample, Sampling, derived_seed
from replaybuf.wire.text.pieces import Piece, join_pieces, merge_spans

OnPublish: TypeAlias = Literal["drain", "in-flight", "abort-and-resume", "abort"]
SUPERSEDED = "superseded"
"""A ticket returned with this reason does not count as a failed attempt of its prompt."""


def rejection(on_publish: OnPublish, sample: Sample) -> tuple[str, str] | None:
    """Return why a policy rejects a sample, as (reason, detail); None where the sample is accepted.

    - `engine_aborted`: it holds an aborted completion; only `abort-and-resume` continues those.
    - `engine_version_changed`: the server reports no spans and its version changed, so the version of a token is
      unknown. `in-flight` accepts the older version; under the other policies a retry gets one version.
    - `engine_version_changed` also: a completion of two versions where the policy promises one.
    """
    if sample.aborted and on_publish != "abort-and-resume":
        return "engine_aborted", "aborted the completion"
    if not sample.exact and on_publish != "in-flight":
        return "engine_version_changed", "changed its version during the request and reports no spans"
    whole = on_publish in ("drain", "abort")
    mixed = len(sample.version_spans) > len(sample.completion_lengths)
    if whole and mixed and any(len(piece.spans) > 1 for piece in pieces(sample)):
        return "engine_version_changed", f"sampled one completion with two versions; on_publish is {on_publish}"
    return None


def stale(version: int | None, published: int | None) -> bool:
    """Return whether an engine missed a publication: engines load weights before a version is published."""
    return version is not None and published is not None and version < published


def ahead(version: int | None, published: int | None) -> bool:
    """Return whether an engine has weights that are not next to be published: of another run, or before a rewind.

    One version above the published one is normal, because engines load first.
    """
    return version is not None and published is not None and version > published + 1


def too_old(oldest: int, published: int | None, max_staleness: int | None) -> bool:
    """Return whether a group with oldest version `oldest` is too old for every batch to come.

    version(s) >= published for every later step s, so staleness >= published - oldest. None = unknown or unbounded.
    """
    return published is not None and max_staleness is not None and published - oldest > max_staleness


def continued(piece: Piece, later: Piece) -> Piece:
    """Join a piece with the tokens sampled next.

    Raises `GroupAborted` (`superseded`) where the version falls: a rewind took back the weights of this piece.
    """
    if piece.version_falls(later):
        raise GroupAborted(
            SUPERSEDED,
            f"version {later.spans[0, 0]} would continue tokens of version {piece.spans[-1, 0]}",
            name="policy_version",
            value=int(later.spans[0, 0]),
            bound=int(piece.spans[-1, 0]),
        )
    return piece.followed_by(later)


def pieces(sample: Sample) -> list[Piece]:
    """Split a sample into its n rollouts."""
    ends = np.cumsum(sample.completion_lengths)[:-1]
    ids, logprobs = np.split(sample.completion_ids, ends), np.split(sample.inference_logprobs, ends)
    masks = None if sample.completion_mask is None else np.split(sample.completion_mask, ends)
    rollouts = sample.version_spans[:, 0]
    return [
        Piece(
            ids[index],
            logprobs[index],
            merge_spans(sample.version_spans[rollouts == index, 1:]),
            reason,
            None if masks is None else masks[index],
        )
        for index, reason in enumerate(sample.finish_reasons)
    ]


def joined(rollouts: Sequence[Piece], metadata: dict[str, Any]) -> Sample:
    """Join n >= 1 rollouts to a sample."""
    columns = join_pieces(rollouts)
    return Sample(
        completion_ids=columns.completion_ids,
        completion_lengths=columns.completion_lengths,
        inference_logprobs=columns.inference_logprobs,
        version_spans=columns.version_spans,
        finish_reasons=columns.finish_reasons,
        completion_mask=columns.completion_mask,
        metadata=metadata,
    )


def remainder(sampling: Sampling, rollout: int, piece: Piece) -> Sampling:
    """Return how to sample the rest of one rollout: the tokens left, with another seed.

    The first seed would repeat the random numbers of the first tokens.
    """
    seed = None if sampling.seed is None else derived_seed(sampling.seed, rollout, len(piece))
    return dataclasses.replace(sampling, n=1, max_tokens=sampling.max_tokens - len(piece), seed=seed)


def unfinished(piece: Piece, sampling: Sampling) -> bool:
    """Return whether a rollout was aborted before its maximum length."""
    return piece.finish_reason == ABORTED and len(piece) < sampling.max_tokens


def finished(piece: Piece) -> Piece:
    """Return an ended rollout; one aborted at its maximum length has the finish reason `length`."""
    return dataclasses.replace(piece, finish_reason="length") if piece.finish_reason == ABORTED else piece
