"""The benchmarks run, and tell what they measured in a form that can be compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_a_benchmark_writes_down_machine_spread_and_ratio_to_its_reference(tmp_path: Path) -> None:
    done = bench("--only", "selection", "--groups", "3000", "--repeats", "2", results=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "selection.json").read_text())
    assert told["machine"]["cpus"] == os.cpu_count() and told["machine"]["packages"]["numpy"]
    assert told["settings"]["groups"] == 3000
    uniform = {figure["side"]: figure for figure in told["figures"] if figure["what"] == "replay, uniform"}
    ours, plain = uniform["columns"], uniform["list of dicts"]
    assert ours["least"] <= ours["median"] <= ours["largest"] and ours["repeats"] == 2
    assert ours["reference"] == "list of dicts" and ours["ratio"] == plain["median"] / ours["median"]
    assert plain["ratio"] == 1


def test_options_of_a_benchmark_need_its_name(tmp_path: Path) -> None:
    done = bench("--repeats", "2", results=tmp_path)
    assert done.returncode == 2 and "--repeats 2" in done.stderr and "--only" in done.stderr
