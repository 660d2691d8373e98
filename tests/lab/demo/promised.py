"""Whether a short demo kept what the pipeline promises: `python -m tests.lab.demo.promised FOLDER SEED STEPS`.

Generation of step N while N-1 trains: after the first step the trainer finds its batch ready, one version old. Without
that step two demos had, in their first 12, a waiting share of at most 0.005 and a mean staleness of 1.00, one of them
under a load of 18 on 2 cores; four whose generator was held to one or two groups had 0.43 to 0.65 and 0.40 to 0.82.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LARGEST_WAITING = 0.3
LEAST_STALENESS = 0.75
SMALLEST_BYTES = 1000


def broken_promises(report: dict[str, Any], seed: int, steps: int) -> list[str]:
    """List the broken promises of a `report.json`, each with value and bound."""
    broken = []
    if (report["seed"], report["steps"]) != (seed, steps):
        broken.append(f"seed {report['seed']}, steps {report['steps']}; asked for were {seed} and {steps}")
    if report["wall_s"] <= 0:
        broken.append(f"wall_s is {report['wall_s']}; it is above 0")
    for kind, pair in report["accuracy"].items():
        broken += [
            f"accuracy, {kind} {when}, is {share}; it is 0 to 1" for when, share in pair.items() if not 0 <= share <= 1
        ]
    # The first step waits for the first groups.
    curve = {name: report["curve"][name][1:] for name in ("step", "staleness_mean", "wait_s", "train_s", "publish_s")}
    waited, busy = sum(curve["wait_s"]), sum(curve["train_s"]) + sum(curve["publish_s"])
    if waited > LARGEST_WAITING * (waited + busy):
        broken.append(
            f"the trainer waited {waited:.1f} s of {waited + busy:.1f} s; at most {LARGEST_WAITING:.0%} is right"
        )
    staleness = sum(curve["staleness_mean"]) / len(curve["step"])
    if staleness < LEAST_STALENESS:
        broken.append(f"the mean staleness is {staleness:.2f}; at least {LEAST_STALENESS} is right, 1 where none waits")
    return broken


def main(folder: Path, seed: int, steps: int) -> None:
    """Check a demo's report and its files. Raises `SystemExit` with all that is wrong."""
    broken = broken_promises(json.loads((folder / "report.json").read_text()), seed, steps)
    for name in ("report.html", "report.png"):
        if (folder / name).stat().st_size < SMALLEST_BYTES:
            broken.append(f"{name} has less than {SMALLEST_BYTES} bytes")
    if broken:
        raise SystemExit("the demo did not keep what it promises: " + "; ".join(broken))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
