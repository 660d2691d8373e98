"""The report for people: in the terminal, and as the introduction of the HTML page in front of the run's charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from replaybuf.lab.demo.findings import findings, headline
from replaybuf.lab.demo.report import Report, accuracy_rows, figure_rows
from replaybuf.launch.progress import Example
from replaybuf.report import Introduction, bullets, table

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


def introduce(report: Report) -> Introduction:
    """Return the introduction of the page of a run."""
    heading, *accuracies = accuracy_rows(report)
    examples = example_rows(report)
    cores = [] if report.cores is None else [("cores", str(report.cores))]
    figures = [
        *figure_rows(report),
        *cores,
        *((f"version of {name}", number) for name, number in report.versions.items()),
    ]
    parameters = [(part, _joined(values)) for part, values in report.hyperparameters.items()]
    return Introduction(
        title=f"replaybuf demo, seed {report.seed}",
        headline=headline(report),
        lead=f"Seed {report.seed}: GRPO after a short supervised warm start, strategy {report.strategy}",
        sections=[
            bullets("What was measured", findings(report)),
            table("Accuracy on held-out problems, ± one standard error over the problems", accuracies, heading),
            table(
                "Completions before and after",
                examples,
                HEADING,
                note=_examples_note(report, len(examples)),
                kind="examples",
            ),
            table("Figures", figures),
            table("Hyperparameters", parameters, note="They are those of run.toml in the folder of the demo."),
        ],
    )


def _examples_note(report: Report, count: int) -> str:
    first = report.evaluations[0]
    return (
        f"The first {count} of {first.problems} held-out problems, which are in random order: nobody selected them. "
        f"Greedy is the likeliest completion, sampled are {first.samples} at temperature 1."
    )


def _joined(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
