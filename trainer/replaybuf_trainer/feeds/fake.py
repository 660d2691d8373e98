"""Made-up groups in the shapes of a real run, to try, debug and profile a trainer before there is any data."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replaybuf.client.offline import Layout, batch_of_groups
from replaybuf.errors import Invalid
from replaybuf.files import MODEL_FILE_BYTES, read_bounded
from replaybuf.wire.answer.run_status import BatchFacts, RunFacts
from replaybuf.wire.decoding import prepared
from replaybuf.wire.group import OPTIONAL_LOGPROBS, Float32s, Group, Int32s
from replaybuf_trainer.option_groups import Count, FakeShapes

FAKE_RUN = "fake-data"
SPREAD = 0.4
"""Standard deviation of made-up logprobs around those of a uniform choice: ratios on both sides of a clip."""


def with_vocabulary(shapes: FakeShapes, model: Path) -> FakeShapes:
    """Return shapes with the vocabulary of the model folder, unless they have one. Raises `Invalid`."""
    if shapes.vocab_size is not None:
        return shapes
    return msgspec.structs.replace(shapes, vocab_size=_vocab_size(model / "config.json"))


class FakeBatches:
    """Endless batches by seed and step: the same arguments give the same bytes. `columns`: optional ones to send."""

    def __init__(self, shapes: FakeShapes, seed: int, columns: Collection[str] = ()) -> None:
        self._shapes = shapes
        self._seed = seed
        self._columns = [name for name in OPTIONAL_LOGPROBS if name in columns]

    def facts(self) -> RunFacts:
        """Return the facts of a run with these shapes."""
        shapes = self._shapes
        return RunFacts(
            batch=BatchFacts(seq_len=shapes.seq_len), group_size=shapes.group_size, vocab_size=shapes.vocab_size
        )

    def bodies(self, step: int, dp_rank: int = 0, dp_world_size: int = 1) -> Iterator[memoryview]:
        """Yield the bodies of one rank from `step` on."""
        shapes = self._shapes
        layout = Layout(
            seq_len=shapes.seq_len, dp_world_size=dp_world_size, pad_to_multiple_of=shapes.pad_to_multiple_of
        )
        while True:
            rng = np.random.default_rng((self._seed, step))
            groups = [self._group(rng, step, number) for number in range(shapes.groups)]
            yield batch_of_groups(FAKE_RUN, groups, layout, step=step, version=step, dp_rank=dp_rank)
            step += 1

    def _group(self, rng: np.random.Generator, step: int, number: int) -> Group:
        shapes, n = self._shapes, self._shapes.group_size
        vocabulary = shapes.vocab_size or 1
        half = shapes.prompt_tokens // 2
        prompt = int(rng.integers(shapes.prompt_tokens - half, shapes.prompt_tokens + half, endpoint=True))
        lengths = self._completion_lengths(rng, shapes.seq_len - prompt)
        count = int(lengths.sum())
        mask = rng.random(count) >= shapes.masked_share
        mask[np.cumsum(lengths) - 1] = True  # every rollout has a loss token
        rewards = rng.random(n)
        oldest = min(step, shapes.staleness)
        version = step - int(rng.integers(0, oldest, endpoint=True))
        spans = [np.arange(n), np.full(n, version), np.zeros(n), lengths]
        group = Group(
            group_id=f"{step}-{number}",
            prompt_id=f"fake/{step}-{number}",
            policy_version=version,
            prompt_ids=np.tile(rng.integers(0, vocabulary, prompt, np.int32), n),
            prompt_lengths=np.full(n, prompt, np.int32),
            completion_ids=rng.integers(0, vocabulary, count, np.int32),
            completion_lengths=lengths,
            completion_mask=mask,
            inference_logprobs=self._logprobs(rng, count),
            rewards=rewards,
            advantages=(rewards - rewards.mean()) / (rewards.std() + 1e-6),
            version_spans=np.stack(spans, 1).astype(np.int32),
            temperatures=np.ones(n, np.float32),
            finish_reasons=("stop",) * n,
        )
        return msgspec.structs.replace(group, **{name: self._logprobs(rng, count) for name in self._columns})

    def _completion_lengths(self, rng: np.random.Generator, longest: int) -> Int32s:
        """Draw log-normal lengths: most are short, and few are very long."""
        shapes = self._shapes
        drawn = shapes.completion_tokens * np.exp(shapes.tail * rng.standard_normal(shapes.group_size))
        lengths: Int32s = np.clip(np.rint(drawn), 1, longest).astype(np.int32)
        return lengths

    def _logprobs(self, rng: np.random.Generator, count: int) -> Float32s:
        drawn = -np.log(self._shapes.vocab_size or 1) + SPREAD * rng.standard_normal(count)
        logprobs: Float32s = np.minimum(drawn, 0.0).astype(np.float32)
        return logprobs


def _vocab_size(config: Path) -> int:
    """Return the number of token ids of a model folder. Raises `Invalid`."""
    try:
        content: Any = msgspec.json.decode(read_bounded(config, MODEL_FILE_BYTES))
        size = content.get("vocab_size") or content["text_config"]["vocab_size"]
        return msgspec.convert(size, prepared(Count))
    except (OSError, msgspec.MsgspecError, AttributeError, KeyError, TypeError) as error:
        raise Invalid(
            f"{config} has no vocab_size: {error}; check --model, or give vocab_size in --fake-shapes",
            name="model",
            value=str(config),
        ) from error
