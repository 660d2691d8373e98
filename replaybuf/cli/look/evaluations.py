"""The command `replaybuf evals`: results of a run on held-out prompts, newest first."""

from __future__ import annotations

from replaybuf.cli.service import DEFAULT_SERVICE, RunName, Service, client, print_json, print_table
from replaybuf.wire.answer.evaluations import MOST_LISTED, Evaluation


def evals(run: RunName, /, options: Service = DEFAULT_SERVICE) -> None:
    """List the results of a run on held-out prompts, newest first."""
    with client(run, options) as service:
        newest = service.list_evaluations(MOST_LISTED)[::-1]
    if options.json:
        print_json(newest)
        return
    columns = ("set", ">version", ">reward", ">± error", ">completions", ">failed")
    print_table(columns, map(_row, newest))


def _row(result: Evaluation) -> list[object]:
    error = "-" if result.standard_error is None else f"{result.standard_error:.3f}"
    return [result.set_name, result.version, f"{result.reward_mean:.3f}", error, result.rollouts, result.failed]
