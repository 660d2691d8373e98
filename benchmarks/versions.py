"""Measure two versions of replaybuf against each other, in turns.

    git worktree add ../before fa47518 && python -m venv ../before/.venv
    ../before/.venv/bin/pip install ../before psutil
    python benchmarks/versions.py --before ../before/.venv/bin/python --rounds 5

Each version serves a strict Valkey of its own and encodes its own frames. One caller on one connection appends groups
of 8 rollouts x 2,048 tokens as prepared frames on a plain socket, the same through `replaybuf.Client`, and groups of 8
tiny rollouts in JSON; then a trainer fetches, acks and publishes batches of eight groups. Each round measures groups
per second, and processor milliseconds of the service per call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from measured import Measured
from versions_side import PHASES, TIMEOUT_S, Figures

BEFORE, AFTER = "before", "after"


def main() -> None:
    """Measure both versions and record the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="the Python in whose environment the earlier version is installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=400, help="per phase, a multiple of eight")
    options = parser.parse_args()
    if options.before is None:
        parser.error("--before is missing: the Python of the earlier version, such as ../before/.venv/bin/python")
    results = Measured(
        "versions",
        reference=BEFORE,
        packages=["redis", "hiredis", "uvicorn"],
        settings={"rounds": options.rounds, "groups": options.groups},
    )
    seen: dict[str, list[Figures]] = defaultdict(list)
    pythons = {BEFORE: str(Path(options.before).absolute()), AFTER: sys.executable}
    sides = {name: start(python, options.groups) for name, python in pythons.items()}
    try:
        for number in range(options.rounds):
            for name in (list(sides), list(sides)[::-1])[number % 2]:
                seen[name].append(ask(sides[name]))
    finally:
        for side in sides.values():
            side.stdin.close()  # type: ignore[union-attr]
            side.wait(TIMEOUT_S)
    for phase in PHASES:
        by_figure = {
            figure: {name: [figures[phase][figure] for figures in rounds] for name, rounds in seen.items()}
            for figure in ("rate", "cpu_ms")
        }
        results.record(f"{phase}, rate", by_figure["rate"], unit="groups/s")
        results.record(f"{phase}, processor time", by_figure["cpu_ms"], unit="ms", ratio="reference / it")
    results.save()


def start(python: str, groups: int) -> subprocess.Popen[str]:
    """Start the side of one version, away from both checkouts: `python -m` takes the package of its folder."""
    command = [python, str(Path(__file__).resolve().parent / "versions_side.py"), str(groups)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd="/")


def ask(side: subprocess.Popen[str]) -> Figures:
    """Let a side measure one round."""
    if side.stdin is None or side.stdout is None:
        raise RuntimeError("no pipes")
    side.stdin.write("round\n")
    side.stdin.flush()
    figures: Figures = json.loads(side.stdout.readline() or '"the side ended"')
    return figures


if __name__ == "__main__":
    main()
