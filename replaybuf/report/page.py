"""The page of a run: a headline, charts of what was learned and how fast, waits and drops, counts, configuration."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from string import Template
from typing import Any, NamedTuple

import msgspec

from replaybuf.errors import counted
from replaybuf.report.charts import COLOURS, Chart, Line, Values, draw, known_values, number, style_rules
from replaybuf.wire.answer.evaluations import Evaluation
from replaybuf.wire.answer.overview import History
from replaybuf.wire.answer.run_status import RunStatus

POINTS = 600
"""Rows of the history in a report; more steps are merged."""
MOST_METRICS = 64
"""Metrics of the trainer that get a chart."""
_COMPARED_ROWS = 50
"""Rows of the history at both ends whose rewards the headline compares: one step says little."""
_DARK_COLOURS = ("#63c7ab", "#e8956b", "#8fa8ee", "#d597d8", "#c9c96a", "#86bccd", "#e0b64a", "#ef7f9c")
_COUNTS = ("stored", "live", "in_batches", "retired", "dead_lettered")
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { --page: #fff; --text: #1c1f1d; --soft: #5b615c; --rule: #dedfd8;
  $light }
@media (prefers-color-scheme: dark) { :root { --page: #131614; --text: #e6e9e6; --soft: #a3aaa5; --rule: #343a36;
  $dark } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0; }
p, small { color: var(--soft); margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1.2rem; }
svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--soft); }
.frame { stroke: var(--rule); }
$lines
.scroll { overflow-x: auto; }
.scroll th { white-space: nowrap; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
td.number { text-align: right; }
pre, .examples td { white-space: pre-wrap; }
.examples td { font-family: ui-monospace, monospace; font-size: .85rem; }
</style>
</head>
<body>
<h1>$headline</h1>
<p>$lead</p>
$sections
</body>
</html>
""")


class Introduction(NamedTuple):
    """The first lines of a page as text, and sections in front of the charts, as HTML of `table` and `bullets`."""

    title: str
    headline: str
    lead: str
    sections: Sequence[str] = ()


def render(
    status: RunStatus,
    history: History,
    evaluations: Sequence[Evaluation],
    introduction: Introduction | None = None,
) -> str:
    """Return the page as HTML, by default with an introduction that fits any run.

    Text of users is shown as text; parts without data are left out.
    """
    begin = introduction or _introduce(status, history)
    sections = [
        *begin.sections,
        _charts("Learning", [*_held_out(evaluations), *_rewards(history), *_metrics(history)]),
        _charts("Speed", _speed(history)),
        _charts("Data", _data(history)),
        _sums("Waits of the trainer", "seconds", history.waited),
        _sums("Dropped groups", "groups", history.dropped),
        _numbers("Groups", ((name.replace("_", " "), str(getattr(status.groups, name))) for name in _COUNTS)),
        _configuration(status.config),
    ]
    return _PAGE.substitute(
        title=html.escape(begin.title),
        headline=html.escape(begin.headline),
        lead=html.escape(begin.lead),
        sections="\n".join(filter(None, sections)),
        light=_variables(COLOURS),
        dark=_variables(_DARK_COLOURS),
        lines=style_rules([f"var(--c{place})" for place in range(len(COLOURS))]),
    )


def bullets(title: str, sentences: Iterable[str]) -> str:
    """Return a section of sentences."""
    return f"<h2>{html.escape(title)}</h2><ul>{''.join(f'<li>{html.escape(text)}</li>' for text in sentences)}</ul>"


def table(
    title: str, rows: Iterable[Sequence[str]], heading: Sequence[str] = (), *, note: str = "", kind: str = ""
) -> str:
    """Return a section with a table, whose rows have their name in the first cell; `kind`: its class in the style."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heading)
    body = "".join((f"<tr>{head}</tr>", *map(_row, rows)))
    lines = f"<p>{html.escape(note)}</p>" if note else ""
    return f'<h2>{html.escape(title)}</h2>{lines}<div class="scroll"><table class="{kind}">{body}</table></div>'


def _row(cells: Sequence[str]) -> str:
    name, *others = map(html.escape, cells)
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'


def _variables(colours: Iterable[str]) -> str:
    return " ".join(f"--c{place}: {colour};" for place, colour in enumerate(colours))


def headline(status: RunStatus, history: History) -> str:
    """Say in one sentence how far the run is, and where its reward went."""
    rewards = history.columns.get("reward_mean") or []
    steps = counted(status.step, "trained step")
    if not rewards:
        return f"{status.run}: {status.state}, no step yet"
    compared = max(1, min(_COMPARED_ROWS, len(rewards) // 2))
    covered, parts = history.columns["steps"], []
    for end, rows in (("first", slice(compared)), ("last", slice(-compared, None))):
        weights = [int(count or 0) for count in covered[rows]]
        mean = fmean((reward or 0.0 for reward in rewards[rows]), weights)
        parts.append(f"{number(mean)} in the {end} {'step' if sum(weights) == 1 else f'{sum(weights)} steps'}")
    return f"{status.run}: {status.state}, {steps}, mean reward {', '.join(parts)}"


def _introduce(status: RunStatus, history: History) -> Introduction:
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(history.now_s))
    waits = "" if status.waiting is None or status.state == "finished" else f" It waits: {status.waiting.reason}."
    missing = history.metrics_missing and f" {counted(history.metrics_missing, 'metric')} came without a number."
    lead = f"Strategy {status.strategy.name}, published version {status.published_version}, {at}.{waits}{missing or ''}"
    return Introduction(f"Report of run {status.run}", headline(status, history), lead)


def _held_out(evaluations: Sequence[Evaluation]) -> Iterable[Chart]:
    by_set: dict[str, dict[int, Evaluation]] = {}
    for result in evaluations:  # oldest first: the newest of a version counts
        by_set.setdefault(result.set_name, {})[result.version] = result
    for name, by_version in sorted(by_set.items()):
        results = [by_version[version] for version in sorted(by_version)]
        low, high = (
            [None if row.standard_error is None else row.reward_mean + sign * row.standard_error for row in results]
            for sign in (-1, 1)
        )
        line = Line("mean", [row.reward_mean for row in results], low, high)
        versions = [float(row.version) for row in results]
        yield Chart(f"Held-out: {name}", "mean reward ± standard error", "version", versions, [line])


def _rewards(history: History) -> Iterable[Chart]:
    columns = history.columns
    pairs = list(zip(columns["reward_mean"], columns["reward_std"], strict=True))
    low, high = ([mean + sign * std for mean, std in pairs] for sign in (-1, 1))
    line = Line("mean", columns["reward_mean"], low, high)
    yield Chart("Reward", "mean of groups ± spread inside a group", "step", columns["step"], [line])


def _metrics(history: History) -> Iterable[Chart]:
    for name, values in list(history.metrics.items())[:MOST_METRICS]:
        yield _over_steps(history, name, "reported by the trainer", {"value": values})


def _speed(history: History) -> Iterable[Chart]:
    columns = history.columns
    rates = {"trained": columns["tokens_out_per_s"], "stored": columns["tokens_in_per_s"]}
    yield _over_steps(history, "Tokens per second", "tokens", rates)
    yield _over_steps(history, "Seconds per step", "from ack to ack", {"step": columns["step_s"]})
    yield _over_steps(history, "Time from stored to batch", "seconds", {"mean": columns["age_s"]})


def _data(history: History) -> Iterable[Chart]:
    columns = history.columns
    staleness = {"mean": columns["staleness"], "oldest": columns["staleness_max"]}
    yield _over_steps(history, "Staleness at use", "policy versions", staleness)
    lengths = {"mean": columns["length"], "longest": columns["longest"]}
    yield _over_steps(history, "Rollout length", "tokens", lengths)
    yield _over_steps(history, "Uses of a group", "this use counted", {"mean": columns["uses"]})
    rates = zip(columns["tokens_in_per_s"], columns["tokens_out_per_s"], strict=True)
    shares = {"share": [stored / trained if trained else None for stored, trained in rates]}
    yield _over_steps(history, "Generated per step", "tokens stored per token trained", shares)
    yield _over_steps(history, "Groups per batch", "groups", {"groups": columns["groups"]})
    yield _over_steps(history, "Batch fill", "share of the budget", {"fill": columns["fill"]})


def _over_steps(history: History, title: str, unit: str, lines: Mapping[str, Values]) -> Chart:
    return Chart(title, unit, "step", history.columns["step"], [Line(*line) for line in lines.items()])


def _charts(title: str, charts: Iterable[Chart]) -> str:
    shown = [chart for chart in charts if chart.known()]
    panels = "".join(_panel(chart) for chart in shown if not chart.constant())
    texts = _rows((chart.title, _constants(chart)) for chart in shown if chart.constant())
    grid = f'<div class="charts">{panels}</div>' if panels else ""
    return f"<h2>{title}</h2>{grid}{texts}" if shown else ""


def _constants(chart: Chart) -> str:
    return ", ".join(f"{line.name} {number(known_values(line.values)[0])}" for line in chart.known())


def _panel(chart: Chart) -> str:
    names = "".join(
        f' <small class="name{place % len(COLOURS)}">{html.escape(line.name)}</small>'
        for place, line in enumerate(chart.lines if len(chart.lines) > 1 else [])
    )
    head = f"<h3>{html.escape(chart.title)}</h3><small>{html.escape(chart.unit)}</small>{names}"
    return f"<section>{head}{draw(chart)}</section>"


def _sums(title: str, unit: str, by_reason: Mapping[str, Sequence[float]]) -> str:
    totals = sorted(((sum(values), reason) for reason, values in by_reason.items()), reverse=True)
    return _numbers(f"{title} ({unit})", ((reason, number(total)) for total, reason in totals if total))


def _numbers(title: str, rows: Iterable[tuple[str, str]]) -> str:
    shown = _rows(rows)
    return f"<h2>{html.escape(title)}</h2>{shown}" if shown else ""


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td class="number">{html.escape(text)}</td></tr>'
        for name, text in rows
    )
    return f"<table>{cells}</table>" if cells else ""


def _configuration(config: dict[str, Any]) -> str:
    text = msgspec.json.format(msgspec.json.encode(config), indent=2).decode()
    return f"<h2>Configuration</h2><details><summary>as JSON</summary><pre>{html.escape(text)}</pre></details>"
