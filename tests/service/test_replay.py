"""Groups that train more than once, in a real service: uses are counted, bounded, weighted and given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, group


def replay(run: RunClient, groups: int, **options: object) -> int:
    """Create a run of two groups per batch that may be replayed; store groups of version 0 and attach."""
    answer = run.put(
        batch={"groups_per_batch": 2, "seq_len": 64},
        strategy={"name": "replay", "options": {"max_staleness": 50, "look_ahead": 1, **options}},
    )
    assert answer.status_code == 201, answer.text
    run.append(*(group(f"g{n}") for n in range(groups)))
    return run.attach()


def test_groups_are_used_as_often_as_allowed_and_no_more(run: RunClient) -> None:
    """Four groups, three uses: six batches of two, each use counted in body and state; then reuse is exhausted."""
    epoch = replay(run, 4, max_uses=3, order="fifo")
    uses: Counter[str] = Counter()
    for body in run.train(epoch, range(6)):
        batch = read_batch(body)
        uses.update(batch.meta.group_ids)
        micro = batch.micro_batches[0]
        named = [batch.meta.group_ids[position] for position in micro.group_index.tolist()]
        assert micro.times_sampled.tolist() == [uses[name] for name in named]
    assert uses == {f"g{n}": 3 for n in range(4)}
    waiting = run.batch(6, epoch).json()
    assert (waiting["status"], waiting["blocked_on"]) == ("waiting", "producers")
    assert run.state()["groups"]["in_batches"] == 4
    assert run.get("groups/g0").json()["times_sampled"] == 3


def test_prioritized_batches_bring_importance_weights(run: RunClient) -> None:
    """By what the learner said of each group; the rarest draw weighs 1, the others less."""
    epoch = replay(run, 2, max_uses=None, order="prioritized", priority="feedback", exponent=1.0, importance=1.0)
    run.batch(0, epoch)
    assert run.ack(0, epoch, feedback={"priorities": {"g0": 1.0, "g1": 4.0}}).status_code == 200
    run.publish(1, epoch)
    batch = read_batch(run.batch(1, epoch).content)
    micro = batch.micro_batches[0]
    assert micro.sampling_weights is not None
    named = [batch.meta.group_ids[position] for position in micro.group_index.tolist()]
    weights = dict(zip(named, micro.sampling_weights.tolist(), strict=True))
    assert np.isclose(weights["g0"], 1.0) and np.isclose(weights["g1"], 0.25)


@pytest.mark.parametrize("order", ["uniform", "prioritized"])
def test_the_same_appends_and_configuration_give_the_same_batches_whatever_the_run_is_called(
    service: ServeProcess, connect: Callable[[str, str], RunClient], order: str
) -> None:
    """Chance comes from (run seed, generation, step) alone; another seed gives other batches."""
    chosen = []
    for name, seed in ((f"one-{order}", 7), (f"two-{order}", 7), (f"other-{order}", 8)):
        run = connect(service.url, name)
        strategy = {"name": "replay", "options": {"order": order, "max_staleness": 50, "look_ahead": 1}}
        assert run.put(batch={"groups_per_batch": 2, "seq_len": 64}, strategy=strategy, seed=seed).status_code == 201
        run.append(*(group(f"g{n}") for n in range(20)))
        chosen.append([read_batch(body).meta.group_ids for body in run.train(run.attach(), range(4))])
    assert chosen[0] == chosen[1] != chosen[2]
