"""HTML report of a demo: one file that needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from replaybuf.lab.demo.findings import findings, headline
from replaybuf.lab.demo.report import Report, accuracy_rows, figure_rows
from replaybuf.lab.demo.summary import HEADING, example_rows

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>replaybuf demo, seed $seed</title>
<style>
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 1080px;
  margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; line-height: 1.3; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p.lead { color: #6b7785; margin: 0 0 1.5rem; }
img { width: 100%; height: auto; border: 1px solid #e4e8ec; border-radius: 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .4rem .9rem .4rem 0; border-bottom: 1px solid #e4e8ec; vertical-align: top; }
th { color: #6b7785; font-weight: 500; white-space: nowrap; }
.examples td { font-family: ui-monospace, monospace; font-size: .85rem; white-space: pre-wrap; }
li { margin: .35rem 0; }
footer { color: #6b7785; font-size: .9rem; margin: 2.5rem 0; }
</style>
</head>
<body>
<h1>$headline</h1>
<p class="lead">replaybuf demo, seed $seed: GRPO after a short supervised warm start, strategy $strategy</p>
<img alt="Reward, held-out accuracy, staleness, waits, the trainer's time and tokens per second over the steps"
  src="data:image/png;base64,$picture">
<h2>What was measured</h2>
<ul>$findings</ul>
<h2>Accuracy on held-out problems, ± one standard error over the problems</h2>
<div class="scroll"><table>$accuracy</table></div>
<h2>Completions before and after</h2>
<p class="lead">$examples_note</p>
<div class="scroll"><table class="examples">$examples</table></div>
<h2>Figures</h2>
<div class="scroll"><table>$figures</table></div>
<h2>Hyperparameters</h2>
<div class="scroll"><table>$hyperparameters</table></div>
<p class="lead">They are those of <code>run.toml</code> in the folder of the demo.</p>
<footer>$footer</footer>
</body>
</html>
""")


def write_page(report: Report, picture: Path, path: Path) -> None:
    """Write the report as HTML with the picture in it."""
    heading, *body = accuracy_rows(report)
    examples = example_rows(report)
    cores = "" if report.cores is None else f"{report.cores} cores, "
    text = PAGE.substitute(
        seed=report.seed,
        strategy=html.escape(report.strategy),
        headline=html.escape(headline(report)),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        accuracy=_row(heading, "th") + "".join(_row(row, "td") for row in body),
        figures="".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in figure_rows(report)
        ),
        findings="".join(f"<li>{html.escape(sentence)}</li>" for sentence in findings(report)),
        examples_note=html.escape(_examples_note(report, len(examples))),
        examples=_row(HEADING, "th") + "".join(_row(row, "td") for row in examples),
        hyperparameters="".join(
            f"<tr><th>{html.escape(part)}</th><td>{html.escape(_joined(values))}</td></tr>"
            for part, values in report.hyperparameters.items()
        ),
        footer=html.escape(cores + ", ".join(f"{name} {number}" for name, number in report.versions.items())),
    )
    path.write_text(text, encoding="utf-8")


def _examples_note(report: Report, count: int) -> str:
    first = report.evaluations[0]
    return (
        f"The first {count} of {first.problems} held-out problems, which are in random order: nobody selected them. "
        f"Greedy is the likeliest completion, sampled are {first.samples} at temperature 1."
    )


def _joined(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _row(cells: Iterable[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
