"""Write benchmarks/results/README.md from benchmarks/results/*.json; docs/benchmark-results.md includes it.

    python benchmarks/tables.py

`make bench` and `make docs` call it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MOST_LINES = 16
"""A table of more lines is folded."""


def number(value: float) -> str:
    """Format with three significant digits and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cell(figure: dict[str, Any]) -> str:
    """Format one side: median [least to largest], ratio to the reference, target."""
    text = number(figure["median"])
    if figure["repeats"] > 1:
        text += f" [{number(figure['least'])} to {number(figure['largest'])}]"
    if figure["ratio"] is not None and figure["side"] != figure["reference"]:
        text += f", × {number(figure['ratio'])}"
    for judged in figure["targets"]:
        target = judged["target"]
        met = "met" if judged["met"] else "missed"
        text += f" ({target['of']} {target['wanted']} {target['bound']:g}: {met})"
    return text


def table(result: dict[str, Any]) -> str:
    """Format one benchmark: the machine in a line, then one row per comparison, the reference first."""
    machine, settings = result["machine"], result["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    about = [
        f"### {result['benchmark']}",
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime(result['at_s']))}; {machine['cpus']} CPUs ({machine['processor']}), "
        f"load {machine['load']:.1f}, Python {machine['python']}{', ' if packages else ''}{packages}; "
        + ", ".join(f"{name} {value}" for name, value in settings.items())
        + ".",
        "",
    ]
    head = [
        f"| | unit | {result['reference']} | others: median [least to largest], × ratio |",
        "|---|---|---|---|",
    ]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for figure in result["figures"]:
        rows.setdefault((figure["what"], figure["unit"]), []).append(figure)
    body = []
    for (what, unit), figures in rows.items():
        reference = [cell(figure) for figure in figures if figure["side"] == result["reference"]]
        others = [f"{figure['side']}: {cell(figure)}" for figure in figures if figure["side"] != result["reference"]]
        body.append(f"| {what} | {unit} | {' '.join(reference)} | {'<br>'.join(others)} |")
    if sum(1 + row.count("<br>") for row in body) > MOST_LINES:
        opening = ['<details markdown="1">', f"<summary>{len(body)} rows</summary>", ""]
        return "\n".join([*about, *opening, *head, *body, "", "</details>"]) + "\n"
    return "\n".join([*about, *head, *body]) + "\n"


def page(results: Path = RESULTS) -> str:
    """Format the tables of all results."""
    return "\n".join(table(json.loads(path.read_text())) for path in sorted(results.glob("*.json")))


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(page())
