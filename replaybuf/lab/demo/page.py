"""Introduction of a demo's HTML report, before the charts of the run: findings, accuracy, completions, figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replaybuf.lab.demo.findings import findings, headline
from replaybuf.lab.demo.report import Report, accuracy_rows, figure_rows
from replaybuf.lab.demo.summary import HEADING, example_rows
from replaybuf.report import Introduction, bullets, table


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
