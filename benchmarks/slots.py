"""Cost and gain of `exact_slots`: waiting of the trainer and length bias, in the simulator, for heavy-tailed lengths.

    python benchmarks/slots.py --steps 200 --seeds 5

Each figure is the median over the seeds with the least and the largest. The reference is the same strategy without
the option, with the same prompts, lengths and speeds. Times are virtual, so the machine has no effect. The length bias
is the mean length of used groups over that of generated ones.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from measured import Measured

from replaybuf.lab.simulate.figures import Figures
from replaybuf.lab.simulate.loop import simulate
from replaybuf.lab.simulate.workload import Supply, Workload
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec

ARRIVAL, SLOTS = "order of arrival", "exact slots"
STALENESS = (1, 2, 4, 8)
WORKLOAD = Workload(slots=128, length_sigma=1.0, length_max=16_000)
SHOWN: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("trainer waits", "% of the time", lambda figures: 100 * figures.wait_share),
    ("length bias", "used / generated", lambda figures: figures.length_bias),
    ("wasted", "% of the tokens", lambda figures: 100 * figures.waste_share),
)


def main() -> None:
    """Simulate and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    names = ("slots", "length_mean", "length_sigma", "length_max", "train_s", "publish_s")
    workload = {name: value for name, value in dataclasses.asdict(WORKLOAD).items() if name in names}
    results = Measured("slots", reference=ARRIVAL, packages=["numpy"], settings=vars(arguments) | workload)
    for most in STALENESS:
        sides = {
            side: [
                run({"max_staleness": most, "exact_slots": side == SLOTS}, seed, arguments.steps)
                for seed in range(arguments.seeds)
            ]
            for side in (ARRIVAL, SLOTS)
        }
        for what, unit, value in SHOWN:
            values = {side: [value(figures) for figures in runs] for side, runs in sides.items()}
            results.record(f"max_staleness {most}: {what}", values, unit=unit)
    results.save()


def run(options: dict[str, object], seed: int, steps: int) -> Figures:
    """Simulate one run of 64 groups of 8 rollouts per batch."""
    config = RunConfig(
        batch=BatchSpec(tokens_per_batch=None, groups_per_batch=64, seq_len=32_768),
        group_size=8,
        strategy=StrategySpec("one-step-off-policy", options),
    )
    return simulate(config, Supply(WORKLOAD, config, seed), steps)


if __name__ == "__main__":
    main()
