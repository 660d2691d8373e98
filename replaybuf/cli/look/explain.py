"""The command `replaybuf explain`: show why a batch has its groups, from the candidates to the rows of each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replaybuf.cli.service import (
    RunName,
    ServiceOptions,
    StepNumber,
    client,
    draw_bar,
    explain_waiting,
    print_json,
    print_table,
    printable,
)
from replaybuf.errors import counted
from replaybuf.wire.answer.explain import AdapterCandidates, Arrivals, BatchExplanation, Choice, ChosenGroup, Packing
from replaybuf.wire.contract import Amount

BAR_WIDTH = 24
MOST_RANKS = 64
"""Ranks shown; `--json` has all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainOptions(ServiceOptions):
    """The batch to explain."""

    generation: int | None = None
    """History of the batch, if a rewind voided it."""
    limit: int = 10
    """Groups to list, in the order of the strategy."""


def explain(
    run: RunName, step: StepNumber, /, options: Annotated[ExplainOptions, Parameter(name="*")] = ExplainOptions()
) -> None:
    """Show why the batch of a step has its groups, or why the next one is not there."""
    with client(run, options) as service:
        explanation = service.explain_batch(step, options.generation, options.limit)
    if options.json:
        print_json(explanation)
    else:
        show_explanation(explanation, Console())


def show_explanation(explanation: BatchExplanation, console: Console) -> None:
    """Print an explanation: head, what came before, funnel, order, packing, what is unknown."""
    for line in _head(explanation):
        console.print(Text(printable(line)))
    if explanation.since_last_batch:
        console.print(Text(printable(f"since the last batch: {_arrivals(explanation.since_last_batch)}")))
    for adapter, candidates in explanation.candidates.items():
        console.print()
        chosen = explanation.choice.adapters.get(adapter, 0) if explanation.choice else None
        console.print(_funnel(adapter, candidates, chosen, console))
    if explanation.choice:
        console.print()
        _print_order(explanation.choice, console)
    if explanation.packing:
        console.print(_packing(explanation.packing, console))
    for line in explanation.unknown:
        console.print(Text(printable(f"unknown: {line}")))


def _head(explanation: BatchExplanation) -> Iterator[str]:
    version = "" if explanation.version is None else f", trains version {explanation.version}"
    short = f", short because of its {explanation.short}" if explanation.short else ""
    yield f"step {explanation.step} of {explanation.run}: {explanation.state}{version}{short}"
    options = ", ".join(f"{name} {value}" for name, value in explanation.options.items())
    filters = ", ".join(explanation.filters) or "none"
    yield f"strategy {explanation.strategy} ({options}); filters {filters}; seed {explanation.seed}"
    if explanation.waiting:
        waits = explanation.waiting
        yield f"waits: {waits.reason}, blocked on {waits.blocked_on}; has {_amount(waits.have)}{_needs(waits.need)}"
        yield from (f"  {line}" for line in explain_waiting(waits))


def _amount(amount: Amount) -> str:
    return f"{counted(amount.groups, 'group')} and {counted(amount.tokens, 'token')}"


def _needs(need: Amount) -> str:
    """Write the requirements that there are: 0 = none."""
    parts = [counted(count, what) for count, what in ((need.groups, "group"), (need.tokens, "token")) if count]
    return f", needs {' and '.join(parts)}" if parts else ""


def _arrivals(since: Arrivals) -> str:
    parts = [f"{counted(since.stored, 'group')} stored"]
    parts += [f"{count} dropped as {reason}" for reason, count in since.dropped.items()]
    parts += [f"{count} rejected as {reason}" for reason, count in since.rejected.items()]
    return ", ".join(parts)


def _funnel(adapter: str, candidates: AdapterCandidates, chosen: int | None, console: Console) -> Table:
    """Draw live, left out, usable and chosen groups; `chosen` is None without a batch."""
    budget = candidates.budget
    bounds = [
        counted(budget.groups, "group") if budget.groups else "",
        counted(budget.tokens, "token") if budget.tokens else "",
    ]
    rows: list[tuple[str, int, str]] = [("live", candidates.live, counted(candidates.live_tokens, "token"))]
    rows += [(f"- {reason}", count, "left out by a rule") for reason, count in candidates.left_out.items()]
    rows.append(("usable", candidates.usable, "given to the strategy"))
    if chosen is not None:
        rows.append(("- for later batches", max(0, candidates.usable - chosen), "not chosen by the strategy"))
        rows.append(("chosen", chosen, ""))
    rows.append(("budget", budget.groups, " or ".join(filter(None, bounds)) or "none"))
    title = f"candidates of adapter {adapter}" if adapter else "candidates"
    table = Table(title=printable(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for name, count, note in rows:
        bar = "" if name == "budget" else draw_bar(count / max(1, candidates.live), BAR_WIDTH, console)
        shown = "" if name == "budget" else str(count)
        table.add_row(Text(printable(name)), shown, Text(bar, style=_style(name)), Text(note))
    return table


def _style(name: str) -> str:
    return "red" if name.startswith("-") else "green" if name == "chosen" else "cyan"


def _print_order(choice: Choice, console: Console) -> None:
    columns = (">", "group", "prompt", ">version", ">staleness", ">use", ">tokens", ">reward", ">spread", ">age (s)")
    more = choice.groups - len(choice.first)
    amounts = ((choice.groups, "group"), (choice.rollouts, "rollout"), (choice.tokens, "token"))
    title = f"order of the strategy: {', '.join(counted(number, noun) for number, noun in amounts)}"
    rows = ([number, *_row(group)] for number, group in enumerate(choice.first, 1))
    print_table(columns, rows, title=title + (f"; {more} more not shown" if more else ""), console=console)


def _row(group: ChosenGroup) -> list[object]:
    scores = [None if value is None else f"{value:.3f}" for value in (group.reward_mean, group.reward_std)]
    age = None if group.age_s is None else f"{group.age_s:.1f}"
    facts = [group.policy_version, group.staleness, group.times_sampled, group.tokens]
    return [group.group_id, group.prompt_id, *facts, *scores, age]


def _packing(packing: Packing, console: Console) -> Table:
    title = (
        f"packing for {counted(packing.dp_world_size, 'rank')} ({packing.layout}): "
        f"{counted(packing.micro_batches, 'row')} of "
        f"{counted(packing.seq_len, 'token')} each, {packing.fill:.1%} full"
    )
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    for rank in packing.ranks[:MOST_RANKS]:
        bar = Text(draw_bar(rank.fill, BAR_WIDTH, console), style="cyan")
        rows = " ".join(f"{row.rollouts}" for row in rank.rows[:16]) + (" ..." if len(rank.rows) > 16 else "")
        facts = f"{rank.fill:6.1%}  {counted(rank.tokens, 'token')}, {counted(rank.rollouts, 'rollout')} by row: {rows}"
        table.add_row(f"rank {rank.dp_rank}", bar, Text(facts))
    if len(packing.ranks) > MOST_RANKS:
        table.add_row(f"{len(packing.ranks) - MOST_RANKS} more", "", Text("--json has all ranks"))
    return table
