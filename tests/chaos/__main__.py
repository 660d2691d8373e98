"""Command line of the chaos test: `python -m tests.chaos`."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import msgspec
from rich.console import Console

from tests.chaos.chaos import chaos
from tests.chaos.cluster import TOPOLOGIES
from tests.chaos.faults import WEIGHTS
from tests.chaos.runs import RUNS

SECONDS_PER_KILL = 6.0
START_S = 60.0


def main() -> None:
    """Run the chaos test; exit with 1 after a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="faults to survive, of every kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", nargs="+", choices=list(RUNS), default=list(RUNS), help="runs to train; all")
    parser.add_argument("--fault", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS), help="kinds of faults; all")
    parser.add_argument("--adapters", type=int, default=0, help="add one run that trains this many adapters")
    parser.add_argument(
        "--topology", choices=TOPOLOGIES, default="single", help="Valkey alone, or with replicas: it fails over"
    )
    parser.add_argument("--replicas", type=int, default=1, help="of each primary of a cluster")
    parser.add_argument("--time-limit-s", type=float, help="end the faults after so many seconds")
    parser.add_argument("--report", type=Path, help="JSON file for the figures")
    parser.add_argument("--folder", type=Path, help="keep data, logs and history here")
    options = parser.parse_args()
    if options.replicas < 1 or (options.replicas > 1 and options.topology != "cluster"):
        parser.error(f"--replicas is {options.replicas}; only --topology cluster may have more than 1")
    logging.basicConfig(level=logging.ERROR)
    if options.folder and options.folder.exists():
        parser.error(f"--folder {options.folder} exists; a run wants a new one")
    limit_s = options.time_limit_s or START_S + SECONDS_PER_KILL * options.kills
    report = chaos(
        options.kills,
        options.seed,
        limit_s,
        options.strategy,
        options.folder,
        Console(),
        options.adapters,
        options.fault,
        topology=options.topology,
        replicas=options.replicas,
    )
    if options.report:
        options.report.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    raise SystemExit(0 if report.good else 1)


if __name__ == "__main__":
    main()
