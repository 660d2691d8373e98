"""Run schedules and report each failure as one command: `make simulate-faults [SEEDS=200] [SEED=n] [SECONDS=...]`."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from tests.simulation.broken import BROKEN, simulate_broken
from tests.simulation.schedule import Outcome

SHOWN_LINES = 40
SHOWN_VIOLATIONS = 8
LARGEST_SEED = 10**9


def main() -> None:
    """Read the command line, run the schedules, and exit with 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="number of schedules")
    parser.add_argument("--seed", type=int, help="run this schedule alone, and show its trace")
    parser.add_argument("--base", type=int, help="first seed; a random one by default")
    parser.add_argument("--seconds", type=float, help="start no further schedule after this time")
    parser.add_argument("--broken", choices=sorted(BROKEN), help="break a guarantee, and end at the first failure")
    options = parser.parse_args()
    if options.seed is not None:
        outcome = simulate_broken((options.seed, options.broken), traced=True)
        _show(outcome, options.broken)
        digest = hashlib.sha256("\n".join(outcome.trace).encode(errors="replace")).hexdigest()
        print(f"seed {outcome.seed}: hash {digest}, {len(outcome.trace)} events")
        sys.exit(bool(outcome.violations))
    base = random.SystemRandom().randrange(LARGEST_SEED) if options.base is None else options.base
    sys.exit(_run(base, options.seeds, options.seconds, options.broken))


def _run(base: int, seeds: int, seconds: float | None, broken: str | None) -> bool:
    """Run the schedules; return whether one failed."""
    print(f"seeds {base} to {base + seeds - 1}", flush=True)
    started_s, done, failed, faults = time.monotonic(), 0, 0, Counter[str]()
    with contextlib.closing(_outcomes(base, seeds, broken)) as outcomes:
        for outcome in outcomes:
            done += 1
            faults.update(outcome.faults)
            if outcome.violations:
                failed += 1
                _show(outcome, broken)
                if broken:
                    break
            if seconds is not None and time.monotonic() - started_s > seconds:
                break
    rate = 60 * done / (time.monotonic() - started_s)
    shown = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    verdict = "BAD" if failed else "GOOD"
    print(f"{verdict}: {done} schedules from seed {base}, {failed} failed, {rate:.0f} per minute; faults: {shown}")
    return bool(failed)


def _outcomes(base: int, seeds: int, broken: str | None) -> Generator[Outcome, None, None]:
    """Run schedules on all processors; the outcomes come in the order of their seeds."""
    # Fresh processes: a fork would share what the parent has loaded, and its threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(simulate_broken, ((base + number, broken) for number in range(seeds)))


def _show(outcome: Outcome, broken: str | None) -> None:
    if not outcome.violations:
        return
    command = f"make simulate-faults SEED={outcome.seed}" + (f" ARGS='--broken {broken}'" if broken else "")
    print(f"FAILED: {command}")
    for violation in outcome.violations[:SHOWN_VIOLATIONS]:
        print(f"  {violation}")
    path = Path(tempfile.gettempdir()) / f"simulation-{outcome.seed}.txt"
    path.write_text("\n".join(outcome.trace))
    for line in outcome.trace[-SHOWN_LINES:]:
        print(f"    {line}")
    print(f"  all {len(outcome.trace)} events: {path}", flush=True)


if __name__ == "__main__":
    main()
