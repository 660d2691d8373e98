"""The report as a terminal shows it, and the choice of the examples in it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from replaybuf.lab.demo.findings import findings, headline
from replaybuf.lab.demo.report import Report, accuracy_rows, figure_rows
from replaybuf.launch.progress import Example

SHOWN_EXAMPLES = 4
HEADING = ("problem", "right answer", "greedy before", "after", "sampled before", "after")
RIGHT, WRONG = "\N{NO-BREAK SPACE}✓", "\N{NO-BREAK SPACE}✗"


def example_rows(report: Report) -> list[list[str]]:
    """Return the examples before and after as rows of cells; ✓ and ✗ mark right and wrong completions."""
    before, after = report.evaluations[0].examples, {late.prompt: late for late in report.evaluations[-1].examples}
    return [_example_row(early, after[early.prompt]) for early in before if early.prompt in after]


def print_report(console: Console, report: Report, paths: Sequence[object]) -> None:
    """Print the result, examples, figures, findings and the paths of the files."""
    console.print(Text(headline(report), style="bold"))
    heading, *body = accuracy_rows(report)
    console.print(Group(_table(heading, body, first="left", others="right"), Text()))
    if examples := example_rows(report)[:SHOWN_EXAMPLES]:
        console.print(Group(_table(HEADING, examples, first="left", others="left"), Text()))
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column()
    for name, text in figure_rows(report):
        figures.add_row(name, text)
    console.print(Group(figures, Text()))
    for sentence in findings(report):
        console.print(Text(f"- {sentence}", style="dim"))
    console.print()
    for path in paths:
        console.print(str(path), highlight=False, soft_wrap=True)


def _example_row(early: Example, late: Example) -> list[str]:
    marked = [
        _marked(text, right) for text, right in ((early.greedy, early.greedy_right), (late.greedy, late.greedy_right))
    ]
    sampled = [
        ", ".join(_marked(text, right) for text, right in zip(pair.sampled, pair.sampled_right, strict=True))
        for pair in (early, late)
    ]
    return [early.prompt, early.answer or "-", *marked, *sampled]


def _marked(text: str, right: bool) -> str:
    return f"{text}{RIGHT if right else WRONG}"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], *, first: str, others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, name in enumerate(heading):
        table.add_column(name, justify=others if position else first, header_style="dim")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(Text, row))
    return table
