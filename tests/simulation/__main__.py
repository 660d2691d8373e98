"""Run schedules and report each failure as one command: `make simulate-faults [SEEDS=200] [SEED=n] [SECONDS=...]`."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from tests.simulation.broken import BROKEN, redis_of, simulate_broken
from tests.simulation.coverage import Reached, describe
from tests.simulation.mix import REDIS
from tests.simulation.plan import Plan
from tests.simulation.release import OtherRelease, base_of_product, check_release
from tests.simulation.schedule import Outcome, digest
from tests.simulation.shrinking import Shrinker

SHOWN_FAULTS, LINES_BEFORE, LINES_AFTER = 3, 6, 12
SHOWN_VIOLATIONS = 8
LARGEST_SEED = 10**9


def main() -> None:
    """Read the command line, run the schedules, and exit with 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="number of schedules")
    parser.add_argument("--seed", type=int, help="run this schedule alone, and show its trace")
    parser.add_argument(
        "--base", type=_first_seed, help="first seed; `product`: that of the product's sources; by default a random one"
    )
    parser.add_argument("--seconds", type=float, help="start no further schedule after this time")
    parser.add_argument("--broken", choices=sorted(BROKEN), help="break a guarantee, and end at the first failure")
    parser.add_argument("--only", type=_numbers, help="numbers of the faults that happen, as a failure prints them")
    parser.add_argument("--faults-s", type=float, help="length of the fault phase")
    parser.add_argument("--redis", choices=sorted(set(REDIS)), help="kind of Redis; drawn from each seed by default")
    parser.add_argument("--release", help="of the code that printed the seed")
    parser.add_argument("--no-shrink", action="store_true", help="report a failure as it is")
    options = parser.parse_args()
    redis = options.redis or redis_of(options.broken)
    if options.seed is not None:
        try:
            check_release(options.seed, options.release)
        except OtherRelease as error:
            parser.error(str(error))
        plan = Plan(options.seed, options.broken, options.only, options.faults_s, redis)
        outcome = simulate_broken(plan, traced=True)
        _show(outcome)
        print(f"seed {plan.seed}: hash {digest(outcome.trace)}, {len(outcome.trace)} events")
        sys.exit(bool(outcome.violations))
    base = random.SystemRandom().randrange(LARGEST_SEED) if options.base is None else options.base
    plans = [Plan(seed, options.broken, redis=redis) for seed in range(base, base + options.seeds)]
    sys.exit(_run(plans, options.seconds, shrinks=not options.no_shrink))


def _first_seed(text: str) -> int:
    if text == "product":
        return base_of_product()
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a seed; it must be a number or `product`")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(int, text.split(",")))


def _run(plans: list[Plan], seconds: float | None, *, shrinks: bool) -> bool:
    """Run the schedules; return whether one failed."""
    print(f"seeds {plans[0].seed} to {plans[-1].seed}", flush=True)
    started_s, done, failed, kinds, reached = time.monotonic(), 0, 0, Counter[str](), Reached()
    with contextlib.closing(_outcomes(plans)) as outcomes:
        for outcome in outcomes:
            done += 1
            kinds.update(kind for _, kind in outcome.faults.values())
            reached.add(outcome.reached)
            if outcome.violations:
                failed += 1
                _show(Shrinker(outcome, simulate_broken).shrink() if shrinks else outcome)
                if outcome.plan.broken:
                    break
            if seconds is not None and time.monotonic() - started_s > seconds:
                break
    rate = 60 * done / (time.monotonic() - started_s)
    shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    for line in describe(reached):
        print(line)
    verdict = "BAD" if failed else "GOOD"
    first = f"{done} schedules from seed {plans[0].seed}"
    print(f"{verdict}: {first}, {failed} failed, {rate:.0f} per minute; faults: {shown}")
    return bool(failed)


def _outcomes(plans: list[Plan]) -> Generator[Outcome, None, None]:
    """Run schedules on all processors; the outcomes come in the order of their seeds."""
    # Fresh processes: a fork would share what the parent has loaded, and its threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(simulate_broken, plans)


def _time(line: str) -> float:
    return float(line.split(maxsplit=1)[0])


def _show(outcome: Outcome) -> None:
    if not outcome.violations:
        return
    print(f"FAILED: {outcome.plan.command}")
    for violation in outcome.violations[:SHOWN_VIOLATIONS]:
        print(f"  {violation}")
    path = Path(tempfile.gettempdir()) / f"simulation-{outcome.plan.seed}.txt"
    path.write_text("\n".join(outcome.trace))
    for number, (at_s, kind) in sorted(outcome.faults.items())[-SHOWN_FAULTS:]:
        print(f"  fault {number} at {at_s:.3f} s: {kind}")
        first = bisect.bisect_left(outcome.trace, at_s, key=_time)
        for line in outcome.trace[max(0, first - LINES_BEFORE) : first + LINES_AFTER]:
            print(f"    {line}")
    print(f"  all {len(outcome.trace)} events: {path}", flush=True)


if __name__ == "__main__":
    main()
