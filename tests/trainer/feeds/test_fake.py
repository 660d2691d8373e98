"""Made-up batches: shapes as configured, the same bytes for the same seed, and a training without a service."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import Invalid
from replaybuf.wire.batch import Batch, read_batch
from replaybuf_trainer.feeds.fake import FakeBatches, with_vocabulary
from replaybuf_trainer.feeds.opening import open_feed
from replaybuf_trainer.option_groups import FakeShapes
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.trainer import Trainer
from tests.forked import run_forked

TIMEOUT_S = 250.0


def batch(step: int = 3, rank: int = 0, ranks: int = 1, columns: tuple[str, ...] = (), **shapes: Any) -> Batch:
    source = FakeBatches(FakeShapes(**{"vocab_size": 98} | shapes), seed=7, columns=columns)
    return read_batch(next(source.bodies(step, rank, ranks)))


def column(of: Batch, name: str) -> Any:
    return np.concatenate([getattr(row, name) for row in of.micro_batches])


def test_shapes_are_as_configured() -> None:
    made = batch(groups=6, group_size=3, seq_len=256, pad_to_multiple_of=64, staleness=2, vocab_size=50)
    assert (made.meta.batch_groups, made.meta.batch_rollouts, made.meta.version) == (6, 18, 3)
    assert {len(row.input_ids) % 64 for row in made.micro_batches} == {0}
    assert max(len(row.input_ids) for row in made.micro_batches) <= 256
    assert 40 < column(made, "input_ids").max() < 50
    assert set(column(made, "staleness").tolist()) == {0, 1, 2}
    assert all(row.ref_logprobs is None for row in made.micro_batches)
    assert abs(column(made, "advantages").mean()) < 1


def test_lengths_have_a_heavy_tail() -> None:
    """The same median, and longest completions that differ; no rollout is longer than a micro-batch."""

    def lengths(tail: float) -> Any:
        made = batch(groups=100, group_size=4, seq_len=4096, completion_tokens=50, prompt_tokens=1, tail=tail)
        return np.concatenate([np.diff(row.cu_seqlens) for row in made.micro_batches])

    same, spread = lengths(0.0), lengths(1.5)
    assert set((same // 10).tolist()) == {5}
    assert 40 < np.median(spread) < 65
    assert spread.max() > 20 * np.median(spread) and spread.max() <= 4096


def test_a_share_of_tokens_is_masked_and_every_rollout_has_a_loss_token() -> None:
    made = batch(groups=50, masked_share=0.5, seq_len=512, completion_tokens=20)
    assert 0.4 < made.meta.batch_loss_tokens / (made.meta.batch_tokens - 200 * 32) < 0.7
    for row in made.micro_batches:
        for first, last in itertools.pairwise(row.cu_seqlens.tolist()[: len(row.rewards) + 1]):
            assert row.loss_mask[first:last].any()


def test_the_same_seed_and_step_give_the_same_bytes() -> None:
    """Also to a source that begins later; another step or seed gives others."""
    shapes = FakeShapes(vocab_size=98)
    first, second = itertools.islice(FakeBatches(shapes, 1).bodies(0), 2)
    assert bytes(next(FakeBatches(shapes, 1).bodies(1))) == bytes(second) != bytes(first)
    assert bytes(next(FakeBatches(shapes, 2).bodies(0))) != bytes(first)


def test_ranks_get_their_own_parts_of_one_batch() -> None:
    parts = [batch(rank=rank, ranks=2) for rank in range(2)]
    assert sum(part.meta.rollouts for part in parts) == parts[0].meta.batch_rollouts == 16
    assert parts[0].meta.micro_batches == parts[1].meta.micro_batches


def test_shapes_in_which_no_completion_fits_are_refused() -> None:
    with pytest.raises(Invalid, match="prompts have up to 600 tokens, and seq_len is 512"):
        FakeShapes(prompt_tokens=400)


def test_the_vocabulary_is_that_of_the_model(models: Path, tmp_path: Path) -> None:
    assert with_vocabulary(FakeShapes(), models / "a").vocab_size == 98
    assert with_vocabulary(FakeShapes(vocab_size=12), models / "a").vocab_size == 12
    with pytest.raises(Invalid, match=r"config\.json has no vocab_size: .*check --model"):
        with_vocabulary(FakeShapes(), tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({}, "none"), ({"run": "r", "fake_data": True}, "RUN r, --fake-data"), ({"run": "r", "from_export": "x"}, "x")],
)
def test_batches_come_from_exactly_one_source(fields: dict[str, Any], named: str, models: Path) -> None:
    with (
        pytest.raises(Invalid, match=f"one of RUN, --from-export and --fake-data; given: .*{named}"),
        open_feed(TrainOptions(model=models / "a", **fields)),
    ):
        raise AssertionError("not reached")


def test_every_loss_gets_the_columns_that_it_needs(models: Path, tmp_path: Path) -> None:
    options = TrainOptions(
        fake_data=True,
        model=models / "a",
        steps=1,
        fake_shapes=FakeShapes(groups=1, group_size=2, completion_tokens=8),
        loss="decoupled-ppo",
        loss_options={"reference": {"weight": 0.1}},
        metrics_file=tmp_path / "train.jsonl",
    )
    with open_feed(options) as feed:
        assert Trainer(options, feed).train() == 1
    assert json.loads((tmp_path / "train.jsonl").read_text())["ref_kl"] > 0


def test_a_new_user_trains_without_a_service_and_leaves_nothing_behind(models: Path, tmp_path: Path) -> None:
    words = ["train", "--fake-data", "--model", str(models / "a"), "--steps", "2", "--fake-shapes", '{"groups": 1}']
    ended = run_forked("replaybuf", words, timeout_s=TIMEOUT_S, folder=tmp_path, trainer=True)
    assert ended.returncode == 0, ended.stderr
    assert "trained 2 steps of fake-data" in ended.stdout and "step=1 reward=" in ended.stderr
    assert list(tmp_path.iterdir()) == []
