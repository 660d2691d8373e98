"""Draws the screen of `top`: the list of runs, or the flow of one run from producers to the published version."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from replaybuf.cli.service import draw_bar, printable
from replaybuf.cli.top.poller import Frame
from replaybuf.cli.top.screen import Screen, attention
from replaybuf.cli.top.texts import age, amount, count, since, sparkline, waits
from replaybuf.errors import counted
from replaybuf.wire.answer.overview import Flow, RunRow
from replaybuf.wire.contract import ProducerStatus
from replaybuf.wire.wait_reasons import REASONS

STYLES = ("bold red", "yellow", "", "dim")
"""Of a run, by how much it needs a person."""
HEAD_LINES = 6
LONGEST_NAME = 28
NEXT_BATCH = "next batch"
MOST_PRODUCERS = 20
MOST_VERSIONS = 6
BAR_WIDTH = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column of the list: title, width, text of a run. Columns with a higher `rank` go first on a narrow terminal."""

    title: str
    width: int
    rank: int
    text: Callable[[RunRow], str]
    right: bool = False


COLUMNS = (
    Column("run", 20, 0, lambda row: row.run),
    Column("state", 8, 2, lambda row: _state(row)),
    Column("step", 11, 4, lambda row: f"{row.step}/{row.max_steps}" if row.max_steps else str(row.step), right=True),
    Column("vers", 5, 8, lambda row: str(row.published_version), right=True),
    Column("tok/s", 6, 5, lambda row: count(row.tokens_per_s), right=True),
    Column("reward", 7, 6, lambda row: f"{row.rewards[-1]:.3f}" if row.rewards else "-", right=True),
    Column("", 12, 10, lambda row: sparkline(row.rewards, 12)),
    Column("stale", 5, 3, lambda row: "-" if row.staleness is None else f"{row.staleness:.1f}", right=True),
    Column("live", 6, 9, lambda row: count(row.groups_live), right=True),
    Column("trainer", 7, 7, lambda row: age(row.trainer_last_seen_s), right=True),
    Column("producers", 13, 3, lambda row: _producers(row), right=True),
    Column(NEXT_BATCH, max(map(len, REASONS)) + 1, 1, waits),  # the rest of a longer text becomes an ellipsis
    Column("idle", 5, 5, lambda row: "-" if row.idle_s is None else age(row.idle_s), right=True),
)


def draw(frame: Frame, screen: Screen, console: Console, url: str, now_s: float) -> RenderableType:
    """Draw everything that fits the terminal; `now_s` of the clock of the frame."""
    parts: list[RenderableType] = [_head(frame, url, now_s)]
    if screen.run:
        parts += [_run(frame.flow, frame.producers, console)] if frame.flow else [Text("asking for the run ...")]
    elif frame.overview:
        parts += [_runs(frame.overview.runs, screen, console)]
        parts += [Text(printable(f"unreadable: {why}"), style="bold red") for why in frame.overview.unreadable.values()]
    elif not frame.error:
        parts.append(Text("asking for the runs ..."))
    return Group(*parts)


def _head(frame: Frame, url: str, now_s: float) -> Text:
    head = Text(f"replaybuf top  {printable(url)}", style="bold")
    if frame.overview:
        head.append(
            f"  {counted(len(frame.overview.runs), 'run')}, durability {frame.overview.durability}",
            style="not bold dim",
        )
    if frame.error:
        since = f"for {age(now_s - frame.failing_s)}"
        shown = f"; shown is the state of {age(now_s - frame.at_s)} ago" if frame.at_s else ""
        head.append(f"\n{printable(frame.error)} ({since}){shown}", style="bold red")
    return head


def keys_line(screen: Screen) -> Text:
    """Return the line with the keys."""
    keys = "esc all runs  q quit" if screen.run else f"up/down select  enter open  s sort: {screen.order}  q quit"
    return Text(keys, style="dim", no_wrap=True, overflow="ellipsis")


# ---------------------------------------------------------------------- list of runs


def fitting(width: int, longest_name: int) -> list[tuple[Column, int]]:
    """Return the columns that fit, in their order, with their widths; the reason of a wait gets the rest."""
    widths: dict[str, int] = {}
    left = width
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        column_width = min(longest_name, LONGEST_NAME) if column is COLUMNS[0] else column.width
        if left >= column_width + 1 or not widths:
            widths[column.title] = column_width
            left -= column_width + 1
    if NEXT_BATCH in widths:
        widths[NEXT_BATCH] += max(0, left)
    return [(column, widths[column.title]) for column in COLUMNS if column.title in widths]


def _runs(rows: Sequence[RunRow], screen: Screen, console: Console) -> RenderableType:
    if not rows:
        return Text("no runs yet; create one with `replaybuf runs create NAME --from FILE`")
    columns = fitting(console.width, max(len(row.run) for row in rows))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    for column, width in columns:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, width=width, no_wrap=True, overflow="ellipsis")
    shown, place = screen.shown(rows), screen.place(rows)
    height = max(1, console.height - HEAD_LINES) if console.is_terminal else len(shown)
    first = max(0, min(place - height // 2, len(shown) - height))
    for number, row in enumerate(shown[first : first + height], first):
        style = STYLES[attention(row)] + (" reverse" if number == place and console.is_terminal else "")
        table.add_row(*(Text(printable(column.text(row))) for column, _ in columns), style=style)
    hidden = len(shown) - height
    return Group(table, Text(counted(hidden, "more run"), style="dim")) if hidden > 0 else table


def _state(row: RunRow) -> str:
    return "stalled" if row.stands_still else row.state


def _producers(row: RunRow) -> str:
    gone = f" -{row.producers_gone}" if row.producers_gone else ""
    return f"{row.producers_known}{gone} {age(row.producers_last_seen_s)}"


# ---------------------------------------------------------------------- one run


def _run(flow: Flow, producers: Sequence[ProducerStatus], console: Console) -> RenderableType:
    row = flow.row
    title = f"run {row.run}: {_state(row)}, {row.strategy}, step {row.step}" + (
        f" of {row.max_steps}" if row.max_steps else ""
    )
    parts: list[RenderableType] = [Text(printable(title), style=f"bold {STYLES[attention(row)]}"), _flow(flow, console)]
    parts += _waiting(flow)
    if producers:
        parts.append(_producer_table(producers, console))
    return Group(*parts)


def _flow(flow: Flow, console: Console) -> Table:
    """Draw one line per stage, and mark the one that everything waits for."""
    row = flow.row
    blocked = row.waiting.blocked_on if row.waiting and row.state == "running" else ""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, lines in _stages(flow, console):
        mark, style = (">", "bold yellow") if name == blocked else ("", "")
        for number, line in enumerate(lines):
            table.add_row("" if number else mark, "" if number else name, Text(printable(line)), style=style)
    return table


def _stages(flow: Flow, console: Console) -> list[tuple[str, list[str]]]:
    row = flow.row
    gone = f", {row.producers_gone} gone" if row.producers_gone else ""
    speed = f", {row.groups_per_s:.2g} groups/s" if row.groups_per_s else ""
    took = f", {age(flow.group_s)} from ticket to group" if flow.group_s else ""
    producers = f"{row.producers_known} known{gone}, last seen {_ago(row.producers_last_seen_s)}{speed}{took}"
    tokens_live = counted(row.tokens_live, "token", count(row.tokens_live))
    buffer = f"{counted(row.groups_live, 'group')} live, {tokens_live}, newest {_ago(flow.stored_s)}"
    batch = f"newest {_ago(flow.batch_s)}"
    if row.rewards:
        batch += f", reward {row.rewards[-1]:.3f} {sparkline(row.rewards, 24)}"
    batch += "" if row.staleness is None else f", staleness {row.staleness:.2f}"
    trainer = f"last seen {_ago(row.trainer_last_seen_s)}, ack {_ago(flow.ack_s)}, {count(row.tokens_per_s)} tokens/s"
    trainer += f", {age(flow.step_s)} per step" if flow.step_s else ""
    return [
        ("producers", [producers]),
        ("tickets", [f"{flow.tickets_out} out"]),
        ("buffer", [buffer, *_versions(flow, console)]),
        ("batches", [batch]),
        ("trainer", [trainer]),
        ("version", [f"{row.published_version} published"]),
    ]


def _versions(flow: Flow, console: Console) -> list[str]:
    shown = flow.versions[:MOST_VERSIONS]
    most = max((counts.live + counts.in_batches for counts in shown), default=0)
    lines = []
    for counts in shown:
        name = "older" if counts.version is None else f"v{counts.version}"
        bar = draw_bar((counts.live + counts.in_batches) / max(1, most), BAR_WIDTH, console)
        lines.append(f"{name:>7} {bar} {counts.live} live, {counts.in_batches} in batches")
    return lines


def _waiting(flow: Flow) -> list[RenderableType]:
    row, lines = flow.row, []
    if row.alarm:
        lines.append(Text(printable(f"alarm: {row.alarm}"), style="bold red"))
    if row.paused_reason:
        lines.append(Text(printable(f"paused: {row.paused_reason}"), style="bold red"))
    if row.waiting:
        waiting = row.waiting
        idle = "" if row.idle_s is None else f"; no batch and no ack for {age(row.idle_s)}"
        text = f"next batch: {waiting.reason}{amount(waiting)}{since(row)}, blocked on {waiting.blocked_on}{idle}"
        text += f"; {waiting.detail}" if waiting.detail else ""
        text += "".join(
            f"; {producer.name} was last seen {_ago(producer.last_seen_s)}" for producer in waiting.missing[:3]
        )
        lines.append(Text(printable(text), style=STYLES[attention(row)]))
    elif row.state == "running":
        lines.append(Text("next batch: ready"))
    if flow.waited_s:
        waited = sorted(flow.waited_s.items(), key=lambda pair: -pair[1])
        lines.append(Text("waited so far: " + ", ".join(f"{name} {age(s)}" for name, s in waited), style="dim"))
    return [*lines]


def _producer_table(producers: Sequence[ProducerStatus], console: Console) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    wide = console.width >= 76
    titles = ("producer", "seen", "tickets", "groups/min", "faults", *(("held back by",) if wide else ()))
    for name in titles:
        table.add_column(name, justify="left" if name in ("producer", "held back by") else "right", overflow="ellipsis")
    for producer in sorted(producers, key=lambda producer: (not producer.gone, producer.name))[:MOST_PRODUCERS]:
        facts = [
            producer.name,
            age(producer.last_seen_s),
            str(producer.tickets_out),
            f"{producer.groups_per_min:.3g}",
            str(producer.faults),
        ]
        facts += [producer.held_back_by or "-"] if wide else []
        table.add_row(*(Text(printable(fact)) for fact in facts), style="bold red" if producer.gone else "")
    if len(producers) > MOST_PRODUCERS:
        table.caption = counted(len(producers) - MOST_PRODUCERS, "more producer")
    return table


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{age(seconds)} ago"
