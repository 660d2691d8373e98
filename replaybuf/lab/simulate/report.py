"""Show a study: the struct of `report.json`, and a table with one column per strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replaybuf.errors import counted
from replaybuf.lab.simulate.advice import Advice
from replaybuf.lab.simulate.figures import Figures, Lengths
from replaybuf.lab.simulate.workload import Workload

_SHOWN = 0.0005
"""Smaller shares get no line."""


class Study(msgspec.Struct, frozen=True):
    """One workload with one or more strategies; `recorded`: name of the recorded run, or null."""

    seed: int
    steps: int
    workload: dict[str, Any]
    config: dict[str, Any]
    recorded: str | None
    runs: list[Figures]


def title_of(figures: Figures) -> str:
    """Return the name of a strategy with the options that differ from their defaults."""
    options = "\n".join(f"{name}={value}" for name, value in figures.changed_options.items())
    return f"{figures.strategy}\n{options}" if options else figures.strategy


def percent(share: float) -> str:
    """Write a share as percent, with one decimal below 10."""
    return f"{100 * share:.1f}%" if 0 < share < 0.0995 else f"{100 * share:.0f}%"


def rows(runs: Sequence[Figures]) -> list[tuple[str, list[str]]]:
    """Return the table: the name of each figure and its text for every run."""
    table: list[tuple[str, Callable[[Figures], str]]] = [
        ("ended", lambda f: f.ended),
        ("steps, virtual hours", lambda f: f"{f.steps:,} in {f.seconds / 3600:,.1f} h"),
        ("steps per hour", lambda f: f"{f.steps_per_hour:,.1f}"),
        ("trainer trains", lambda f: percent(f.train_share)),
        ("trainer publishes", lambda f: percent(f.publish_share)),
        ("trainer waits", lambda f: percent(f.wait_share)),
        *(_wait_row(reason) for reason in _reasons(runs)),
        ("producers idle", lambda f: percent(f.idle_share)),
        ("staleness mean", lambda f: f"{f.staleness_mean:.2f}"),
        ("staleness at use", _staleness),
        ("uses per used group", lambda f: f"{f.uses_mean:.2f}"),
        ("wasted", lambda f: f"{percent(f.waste_share)} of tokens"),
        *(_waste_row(reason) for reason in sorted({reason for f in runs for reason in f.waste})),
        ("groups live", lambda f: f"mean {f.live_mean:,.0f}, max {f.live_max:,}"),
        (
            "tokens live",
            lambda f: f"max {f.tokens_live_max:,}{f'; {_groups(f.held_groups)} held' * bool(f.held_groups)}",
        ),
        ("prompts used", lambda f: f"{percent(f.coverage.share)} of finished ones"),
        ("length: generated", lambda f: _length(f.generated_lengths)),
        ("length: used", lambda f: _length(f.used_lengths)),
        ("length: dropped", lambda f: _length(f.dropped_lengths)),
        ("length bias", lambda f: f"{f.length_bias:.3f} = used / generated"),
        ("rows unused", lambda f: percent(f.packing.unused_share)),
    ]
    return [(name, [write(figures) for figures in runs]) for name, write in table]


def _groups(number: int) -> str:
    return counted(number, "group", f"{number:,}")


def _reasons(runs: Sequence[Figures]) -> list[str]:
    return sorted({reason for f in runs for reason, share in f.wait_by_reason.items() if share >= _SHOWN})


def _wait_row(reason: str) -> tuple[str, Callable[[Figures], str]]:
    return f"  {reason}", lambda f: percent(f.wait_by_reason.get(reason, 0.0))


def _waste_row(reason: str) -> tuple[str, Callable[[Figures], str]]:
    def write(figures: Figures) -> str:
        waste = figures.waste.get(reason)
        return f"{_groups(waste.groups)}, {waste.tokens / 1e6:,.1f}M tokens" if waste else "0"

    return f"  {reason}", write


def _staleness(figures: Figures) -> str:
    uses = sum(figures.staleness.values())
    shares = {age: count / uses for age, count in figures.staleness.items()}
    return "  ".join(f"{age}: {percent(share)}" for age, share in shares.items()) or "-"


def _length(lengths: Lengths) -> str:
    return f"mean {lengths.mean:,.0f}, p90 {lengths.p90:,.0f}" if lengths.groups else "-"


def print_study(console: Console, study: Study, paths: Sequence[str]) -> None:
    """Print the workload, the table and the paths of the files."""
    defaults = dataclasses.asdict(Workload())
    changed = [f"{k} {_figure(v)}" for k, v in study.workload.items() if study.recorded or v != defaults[k]]
    origin = f"recorded run {study.recorded}" if study.recorded else "synthetic workload"
    console.print(Text(f"{origin}, seed {study.seed}: {', '.join(changed) or 'all defaults'}", style="dim"))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", style="dim", no_wrap=True)
    for figures in study.runs:
        table.add_column(Text(title_of(figures)), justify="left", overflow="fold")
    for name, texts in rows(study.runs):
        table.add_row(name, *(Text(text) for text in texts))
    console.print(table)
    for path in paths:
        console.print(path, highlight=False, markup=False, soft_wrap=True)


def print_advice(console: Console, advice: Advice, as_json: bool) -> None:
    """Print the proposal, a table of what the other choices cost, and how sure the simulator is; or all as JSON."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(advice)).decode())
        return
    proposal = advice.proposal
    waits = f", the trainer waits {percent(proposal.wait_share)}"
    waits += f" ({proposal.wait_reason})" if proposal.wait_reason and proposal.wait_share >= _SHOWN else ""
    line = (
        f"proposal: {proposal.title}, {proposal.generating:.0%} of the GPUs generate, "
        f"{counted(proposal.slots, 'slot', f'{proposal.slots:,}')}: {proposal.steps_per_hour:,.1f} steps per hour"
        f"{waits}, staleness {proposal.staleness_mean:.2f}, {percent(proposal.waste_share)} of tokens wasted"
    )
    console.print(line, highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("another choice", min_width=26, overflow="fold")
    for heading in ("steps/h", "waits", "staleness", "uses", "wasted", "idle"):
        table.add_column(heading, justify="right")
    for cost in advice.costs:
        choice = cost.choice
        table.add_row(
            Text(cost.what),
            f"{cost.steps_change:+.0%}",
            percent(choice.wait_share),
            f"{choice.staleness_mean:.2f}",
            f"{choice.uses_mean:.2f}",
            percent(choice.waste_share),
            percent(choice.idle_share),
        )
    console.print(table)
    if any(cost.choice.reuses for cost in advice.costs):
        console.print("With more than one use a step has fewer new groups; `replaybuf study` measures what it teaches.")
    console.print(advice.sure, highlight=False, markup=False)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
