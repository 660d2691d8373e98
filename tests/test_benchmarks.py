"""`make bench`: short runs save machine, spread, ratios and targets as JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replaybuf.lab.demo.folder import Folder
from replaybuf.wire.config import Cost
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.options import TrainOptions

REPOSITORY = Path(__file__).parent.parent


def bench(*options: str, results: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks", *options],
        cwd=REPOSITORY,
        env=os.environ | {"REPLAYBUF_BENCH_RESULTS": str(results)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_benchmark_saves_machine_spread_and_ratio_to_its_reference(tmp_path: Path) -> None:
    done = bench("--only", "selection", "--groups", "3000", "--repeats", "2", results=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "selection.json").read_text())
    assert result["machine"]["cpus"] == os.cpu_count() and result["machine"]["packages"]["numpy"]
    assert result["settings"]["groups"] == 3000
    uniform = {figure["side"]: figure for figure in result["figures"] if figure["what"] == "replay, uniform"}
    ours, plain = uniform["columns"], uniform["list of dicts"]
    assert ours["least"] <= ours["median"] <= ours["largest"] and ours["repeats"] == 2
    assert ours["reference"] == "list of dicts" and ours["ratio"] == plain["median"] / ours["median"]
    assert plain["ratio"] == 1


def test_a_benchmark_saves_whether_each_target_was_met(tmp_path: Path) -> None:
    options = ("--rollouts", "512", "--ranks", "8", "--repeats", "1")
    done = bench("--only", "packing", *options, results=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "packing.json").read_text())
    judged = {figure["what"]: (figure, *figure["targets"]) for figure in result["figures"] if figure["targets"]}
    rows, of_rows = judged["512 rollouts, 30 batches: rows"]
    assert of_rows == {"target": {"of": "ratio", "wanted": "at most", "bound": 1.0}, "met": rows["ratio"] <= 1.0}
    even, of_even = judged["512 rollouts: costliest rank over the mean"]
    assert (even["side"], of_even["met"]) == ("8 ranks", even["median"] <= of_even["target"]["bound"])
    assert "(target: median at most 1.005, " in done.stdout


def test_options_without_a_benchmark_name_are_an_error(tmp_path: Path) -> None:
    done = bench("--repeats", "2", results=tmp_path)
    assert done.returncode == 2 and "--repeats 2" in done.stderr and "--only" in done.stderr


def test_the_file_queue_has_what_the_reference_trainer_asks_of_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    file_queue, groups, one_rank = map(importlib.import_module, ("file_queue", "groups", "one_rank"))
    folder, generator = Folder(tmp_path), np.random.default_rng(0)
    for step in range(2):
        content = [groups.random_group(generator, number, mean_tokens=400, longest=900) for number in range(2)]
        file_queue.put(file_queue.batch_file(folder, step), bytes(one_rank.one_rank_body(content, step, 1024)))
    feed = ServiceFeed(TrainOptions(url="", run="queue", model=folder.model), file_queue.FileQueue(folder, 2))
    assert feed.facts().steps_per_publish == 1
    feed.attach(0, Cost(1.0, 0.0))
    with feed.batches() as batches:
        for step, batch in enumerate(batches):
            assert batch.meta.step == step
            feed.ack()
            feed.publish(step + 1, None)
            feed.save(step + 1)
    assert file_queue.published(folder) == 2 and not list(tmp_path.glob("batch-*"))
