"""Run the short benchmarks one after the other, as `make bench` does.

    python benchmarks
    python benchmarks --only selection --repeats 21

With `--only` a benchmark takes its own options, or its own defaults. Without it, all benchmarks get short options and
take under six minutes on two cores. Not included are `soak.py`, which takes hours, and `versions.py`, which needs an
earlier version in an environment of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

SHORT = {
    "selection": ["--repeats", "5"],
    "packing": ["--rollouts", "512", "4096", "--ranks", "8", "512", "--repeats", "3"],
    "frames": ["--rounds", "7"],
    "durability": ["--rounds", "2", "--seconds", "1"],
    "rebuild": ["--groups", "100000", "--repeats", "3"],
    "delivery": ["--tokens", "200000", "--ranks", "4", "--rounds", "1"],
    "direct": ["--tokens", "200000", "--ranks", "4", "--steps", "2", "--settle-s", "1"],
    "floor": ["--rounds", "2", "--groups", "160"],
    "phases": ["--rounds", "1", "--groups", "160"],
    "path": ["--rounds", "2", "--steps", "2"],
    "servers": ["--rounds", "1", "--groups", "96"],
    "fleet": ["--producers", "200", "--ranks", "32", "--steps", "2", "--fewer", "40", "--faster", "9"],
    "peers": ["--rounds", "1", "--groups", "160"],
    "waiting": ["--rounds", "1", "--seconds", "1"],
    "growth": ["--sizes", "2", "--repeats", "2"],
    "bodies": ["--rounds", "5"],
    "file_queue": ["--steps", "25"],
    "generator": ["--rollouts", "4000", "--repeats", "2"],
    "spill": ["--rounds", "2", "--groups", "400"],
    "tracing": ["--rounds", "1", "--groups", "1024"],
    "fidelity": ["--steps", "10", "--fleets", "fast"],
    "slots": ["--steps", "50", "--seeds", "3"],
    "weights": ["--rounds", "2", "--megabytes", "50"],
}
"""Benchmarks by file name, and the options that make them short."""
TIMEOUT_S = 600.0
ALONE_TIMEOUT_S = 4 * 3600.0


def main() -> int:
    """Run the benchmarks; report at the end which failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHORT, help="run this benchmark; it gets all further options")
    chosen, options = parser.parse_known_args()
    if options and not chosen.only:
        parser.error(f"options of one benchmark need --only: {' '.join(options)}")
    runs = {chosen.only: options} if chosen.only else SHORT
    failed = [name for name, own in runs.items() if not run(name, own, ALONE_TIMEOUT_S if chosen.only else TIMEOUT_S)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, options: list[str], timeout_s: float) -> bool:
    """Run one benchmark in a process; return whether it succeeded."""
    command = [sys.executable, str(Path(__file__).parent / f"{name}.py"), *options]
    print(f"== {name} {' '.join(options)}".rstrip(), flush=True)
    started_s = time.monotonic()
    try:
        done = subprocess.run(command, timeout=timeout_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{name} took longer than {timeout_s:.0f} s", file=sys.stderr)
        done = False
    print(f"== {name}: {time.monotonic() - started_s:.0f} s\n", flush=True)
    return done


if __name__ == "__main__":
    sys.exit(main())
