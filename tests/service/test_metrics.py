"""Metrics of a real service: reward, tokens in, limits, checkpoints, process and build."""

from __future__ import annotations

import time
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from replaybuf.service.http.call.metrics import _by_staleness
from tests.conftest import RunClient, group


def read_metrics(run: RunClient) -> dict[str, float]:
    """Return the samples of one run and of the server by name; with other labels than `run` by `name{values}`.

    Lines of other runs are not parsed: those of a whole test session take seconds.
    """
    lines = run.http.get("/metrics").text.splitlines(keepends=True)
    mine = [line for line in lines if 'run="' not in line or f'run="{run.run}"' in line]
    values = {}
    for family in text_string_to_metric_families("".join(mine)):
        for sample in family.samples:
            others = ",".join(value for label, value in sample.labels.items() if label != "run")
            values[f"{sample.name}{{{others}}}" if others else sample.name] = sample.value
    return values


def test_reward_tokens_and_limits_of_a_run_are_metrics(run: RunClient) -> None:
    """Before the first batch there is no reward, and before the first ack no time of it."""
    run.put(batch={"groups_per_batch": 1}, limits={"max_tokens_live": 1000})
    before = read_metrics(run)
    assert not {name for name in before if "_batch_reward" in name or "step_timestamp" in name}
    run.append(group("a"), group("b"))
    stored = read_metrics(run)
    assert stored["replaybuf_tokens_stored_total"] == stored["replaybuf_tokens_live"] > 0
    assert stored["replaybuf_limit_used_ratio{max_tokens_live}"] == stored["replaybuf_tokens_live"] / 1000
    epoch = run.attach()
    run.train(epoch, range(1))
    assert run.post("checkpoints", epoch=epoch, step=1).status_code == 200
    after = read_metrics(run)
    least, mean, greatest = (after[f"replaybuf_batch_reward_{name}"] for name in ("min", "mean", "max"))
    assert least == mean == greatest
    assert after["replaybuf_checkpoint_step"] == after["replaybuf_step"] == 1
    assert 0 <= time.time() - after["replaybuf_step_timestamp_seconds"] < 3600
    assert after["replaybuf_tokens_stored_total"] == stored["replaybuf_tokens_stored_total"]


def test_the_process_and_its_version_are_metrics(run: RunClient) -> None:
    """Their names are those of all Prometheus clients."""
    metrics = read_metrics(run)
    assert metrics["process_resident_memory_bytes"] > 1 << 20
    assert metrics["process_open_fds"] > 0
    (build,) = (value for name, value in metrics.items() if name.startswith("replaybuf_build_info{"))
    assert build == metrics["replaybuf_durability_met"] == 1


def test_labels_of_staleness_are_bounded() -> None:
    """A strategy without a limit would make one series per policy version."""
    uses = Counter({0: 5, 64: 2, 65: 1, 9999: 3})
    assert _by_staleness(uses) == [("0", 5), ("64", 2), ("65+", 4)]
