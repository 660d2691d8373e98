"""HTML report of a demo: one file that needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from pathlib import Path
from string import Template

from replaybuf.lab.demo.report import Report, accuracy_rows, figure_rows, headline

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
li { margin: .35rem 0; }
footer { color: #6b7785; font-size: .9rem; margin: 2.5rem 0; }
</style>
</head>
<body>
<h1>$headline</h1>
<p class="lead">replaybuf demo, seed $seed: GRPO after a short supervised warm start, one step off-policy</p>
<img alt="Reward, held-out accuracy, staleness and the trainer's time over the steps"
  src="data:image/png;base64,$picture">
<h2>Accuracy on held-out problems</h2>
<div class="scroll"><table>$accuracy</table></div>
<h2>Figures</h2>
<div class="scroll"><table>$figures</table></div>
<h2>How to read this</h2>
<ul>$notes</ul>
<footer>$footer</footer>
</body>
</html>
""")


def write_page(report: Report, picture: Path, path: Path) -> None:
    """Write the report as HTML with the picture in it."""
    heading, *body = accuracy_rows(report)
    cores = "" if report.cores is None else f"{report.cores} cores, "
    text = PAGE.substitute(
        seed=report.seed,
        headline=html.escape(headline(report)),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        accuracy=_row(heading, "th") + "".join(_row(row, "td") for row in body),
        figures="".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in figure_rows(report)
        ),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in report.notes),
        footer=html.escape(cores + ", ".join(f"{name} {number}" for name, number in report.versions.items())),
    )
    path.write_text(text, encoding="utf-8")


def _row(cells: Iterable[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
