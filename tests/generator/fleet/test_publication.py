"""Rules of publications; a rollout cut into pieces and joined is unchanged."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import EngineFault
from replaybuf.generator.engines import Sample, Sampling
from replaybuf.generator.fleet.publication import (
    OnPublish,
    continued,
    finished,
    joined,
    pieces,
    rejection,
    remainder,
    stale,
    too_old,
    unfinished,
)
from replaybuf.wire.text.pieces import Piece


def piece_of(versions: list[int], *, first: int = 0, reason: str | None = "stop", finely: bool = False) -> Piece:
    """Return a piece with one token per version, numbered from `first`; `finely`: one span per token."""
    spans: list[list[int]] = []
    for place, version in enumerate(versions):
        if spans and spans[-1][0] == version and not finely:
            spans[-1][2] = place + 1
        else:
            spans.append([version, place, place + 1])
    ids = np.arange(first, first + len(versions), dtype=np.int32)
    return Piece(ids, -ids.astype(np.float32), np.array(spans, np.int32).reshape(-1, 3), reason)


def sample_of(*rollouts: list[int], reasons: tuple[str, ...] | None = None, exact: bool = True) -> Sample:
    """Return a sample of rollouts, each given as the versions of its tokens."""
    reasons = reasons or ("stop",) * len(rollouts)
    made = joined([piece_of(rollout, reason=why) for rollout, why in zip(rollouts, reasons, strict=True)], {})
    return dataclasses.replace(made, exact=exact)


def per_token(piece: Piece) -> list[int]:
    """Return the version of every token. Fails where spans leave a gap, overlap, or have equal neighbours."""
    versions: list[int] = []
    for version, start, end in piece.spans.tolist():
        assert start == len(versions) < end and versions[-1:] != [version]
        versions += [version] * (end - start)
    assert len(versions) == len(piece)
    return versions


@given(st.lists(st.integers(0, 3), max_size=12).map(sorted), st.lists(st.integers(0, 12), max_size=4), st.booleans())
def test_a_rollout_cut_anywhere_is_unchanged_when_joined(versions: list[int], cuts: list[int], finely: bool) -> None:
    """Tokens, logprobs, the version of every token and the last reason; pieces may be empty."""
    edges = [0, *sorted(min(cut, len(versions)) for cut in cuts), len(versions)]
    parts = [
        piece_of(versions[start:end], first=start, reason=None if end < len(versions) else "length", finely=finely)
        for start, end in itertools.pairwise(edges)
    ]
    whole = pieces(joined(parts[:1], {}))[0]
    for part in parts[1:]:
        whole = continued(whole, part)
    assert whole.token_ids.tolist() == list(range(len(versions)))
    assert whole.logprobs.tolist() == [-float(token) for token in range(len(versions))]
    assert whole.logprobs.dtype == np.float32 and whole.spans.dtype == whole.token_ids.dtype == np.int32
    assert per_token(whole) == versions
    assert whole.finish_reason == parts[-1].finish_reason


@given(st.lists(st.lists(st.integers(0, 3), max_size=5).map(sorted), min_size=1, max_size=4))
def test_a_sample_split_and_joined_is_the_same_sample(rollouts: list[list[int]]) -> None:
    made = sample_of(*rollouts)
    again = joined(pieces(made), made.metadata)
    for name in ("completion_ids", "completion_lengths", "inference_logprobs", "version_spans"):
        np.testing.assert_array_equal(getattr(again, name), getattr(made, name))
        assert getattr(again, name).dtype == getattr(made, name).dtype
    assert again.finish_reasons == made.finish_reasons
    assert [per_token(piece) for piece in pieces(made)] == rollouts


def test_a_lower_version_cannot_continue_a_rollout() -> None:
    """A rewind took back the weights of the first tokens; their number now means other weights."""
    with pytest.raises(EngineFault) as caught:
        continued(piece_of([5, 6]), piece_of([4]))
    assert (caught.value.reason, caught.value.value, caught.value.bound) == ("superseded", 4, 6)


WHOLE, MIXED = sample_of([3, 3], [4, 4]), sample_of([3, 4], [4, 4])
CUT = sample_of([3, 3], [3], reasons=("stop", "abort"))
UNSURE = sample_of([3, 3], [3, 3], exact=False)


@pytest.mark.parametrize(
    ("on_publish", "made", "reason"),
    [
        ("drain", WHOLE, None),
        ("drain", MIXED, "engine_version_changed"),
        ("drain", CUT, "engine_aborted"),
        ("drain", UNSURE, "engine_version_changed"),
        ("in-flight", WHOLE, None),
        ("in-flight", MIXED, None),
        ("in-flight", CUT, "engine_aborted"),
        ("in-flight", UNSURE, None),
        ("abort-and-resume", WHOLE, None),
        ("abort-and-resume", MIXED, None),
        ("abort-and-resume", CUT, None),
        ("abort-and-resume", UNSURE, "engine_version_changed"),
        ("abort", WHOLE, None),
        ("abort", MIXED, "engine_version_changed"),
        ("abort", CUT, "engine_aborted"),
        ("abort", UNSURE, "engine_version_changed"),
    ],
)
def test_each_policy_accepts_only_its_kinds_of_samples(on_publish: OnPublish, made: Sample, reason: str | None) -> None:
    reported = rejection(on_publish, made)
    assert (None if reported is None else reported[0]) == reason


@pytest.mark.parametrize(
    ("version", "published", "said"), [(3, 3, False), (4, 3, False), (2, 3, True), (None, 3, False), (2, None, False)]
)
def test_an_engine_behind_the_published_version_is_stale(
    version: int | None, published: int | None, said: bool
) -> None:
    assert stale(version, published) is said


@pytest.mark.parametrize(
    ("oldest", "published", "bound", "said"),
    [(3, 5, 2, False), (3, 6, 2, True), (3, 3, 0, False), (3, 9, None, False), (3, None, 0, False), (4, 3, 0, False)],
)
def test_a_group_beyond_max_staleness_is_too_old(oldest: int, published: Any, bound: Any, said: bool) -> None:
    assert too_old(oldest, published, bound) is said


def test_the_remainder_is_one_completion_of_the_remaining_length_with_its_own_seed() -> None:
    sampling = Sampling(n=4, max_tokens=10, temperature=0.5, stop_token_ids=(7,), seed=11)
    rests = [remainder(sampling, rollout, piece_of([1] * length)) for rollout in (0, 1) for length in (3, 4)]
    assert [(rest.n, rest.max_tokens) for rest in rests] == [(1, 7), (1, 6)] * 2
    assert len({rest.seed for rest in rests} | {11}) == 5
    assert all(rest.seed is not None and 0 <= rest.seed < 1 << 53 for rest in rests)
    assert (rests[0].temperature, rests[0].stop_token_ids) == (0.5, (7,))
    assert remainder(Sampling(n=4, max_tokens=10), 0, piece_of([1])).seed is None


def test_a_rollout_aborted_at_its_maximum_length_is_finished() -> None:
    cut = piece_of([1, 1], reason="abort")
    assert unfinished(cut, Sampling(n=1, max_tokens=3)) and not unfinished(cut, Sampling(n=1, max_tokens=2))
    assert finished(cut).finish_reason == "length" and finished(piece_of([1])).finish_reason == "stop"
