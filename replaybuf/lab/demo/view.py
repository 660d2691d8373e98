"""What a person sees while the demo runs: a live panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from replaybuf.lab.demo.progress import Progress, TrainerLine

PLAIN_PERIOD_S = 5.0
BARS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 32
TRAINING = "training"


class View(Protocol):
    """Where the demo's story goes. `event` tells something that happened, `update` what is known now."""

    def event(self, text: str) -> None: ...
    def update(self, progress: Progress) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def choose_view(console: Console) -> View:
    """Choose the live panel for a terminal, plain lines for anything else."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class LiveView:
    """A panel that is redrawn in place; events scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def event(self, text: str) -> None:
        """Print one line above the panel."""
        self._live.console.print(_stamped(self._started, text), highlight=False)

    def update(self, progress: Progress) -> None:
        """Redraw the panel."""
        self._live.update(panel(progress), refresh=True)


class PlainView:
    """Lines of text: each event, and while training a summary every `PLAIN_PERIOD_S`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def event(self, text: str) -> None:
        """Print one line."""
        self._print(text)

    def update(self, progress: Progress) -> None:
        """Print a summary if the last one is old enough."""
        now = time.monotonic()
        if now < self._next:
            return
        if progress.phases.current == TRAINING:
            told = summary(progress)
        elif progress.note:
            told = f"{progress.phases.current}: {progress.note}"
        else:
            return
        self._next = now + PLAIN_PERIOD_S
        self._print(told)

    def _print(self, text: str) -> None:
        self._console.print(_stamped(self._started, text), highlight=False, soft_wrap=True)
        self._console.file.flush()


def panel(progress: Progress) -> RenderableType:
    """Draw everything that is known as one panel."""
    body = Group(_bar(progress), Text(), _figures(progress), Text(), _processes(progress))
    return Panel(body, title=f"replaybuf demo · seed {progress.seed}", title_align="left", border_style="cyan")


def summary(progress: Progress) -> str:
    """Tell the state of the training in one line."""
    lines = progress.ordered
    parts = [f"step {progress.done_steps}/{progress.total_steps}"]
    if lines:
        parts.append(f"reward {_recent_reward(lines):.3f}")
    parts += [f"accuracy {_accuracy(progress)}", f"staleness {_staleness(lines)}", f"buffer {_buffer(progress.state)}"]
    parts += [_speed(progress), f"waited {_waiting(progress)}"]
    if (left := progress.seconds_left) is not None:
        parts.append(f"{clock(left)} left")
    return " | ".join(parts)


def sparkline(values: Sequence[float], points: int = SPARK_POINTS) -> str:
    """Draw values as a row of bars, each the mean of an equal share of them, lowest to highest."""
    if not values:
        return ""
    points = min(points, len(values))
    edges = [round(i * len(values) / points) for i in range(points + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    lowest, span = min(means), max(means) - min(means)
    return "".join(BARS[int((mean - lowest) / span * (len(BARS) - 1))] if span else BARS[0] for mean in means)


def clock(seconds: float) -> str:
    """Write a duration as minutes:seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def megabytes(size: int | None) -> str:
    """Write a size in MB (10^6 bytes); `-` where it is not known."""
    return "-" if size is None else f"{size / 1e6:,.0f} MB"


def whole_seconds(duration_s: float) -> str:
    """Write a duration in whole seconds."""
    return f"{duration_s:,.0f} s"


def percent(share: float | None) -> str:
    """Write a share, 0..1, in percent; `-` where it is not known."""
    return "-" if share is None else f"{share:.1%}"


def _stamped(started: float, text: str) -> Text:
    return Text.assemble((f"{clock(time.monotonic() - started):>5}  ", "dim"), text)


def _bar(progress: Progress) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    left = progress.seconds_left
    if progress.phases.current == TRAINING:
        ending = f"{progress.done_steps}/{progress.total_steps} steps"
        ending += "" if left is None else f", {clock(left)} left"
    else:
        ending = progress.note
    bar = ProgressBar(total=progress.total_steps, completed=min(progress.done_steps, progress.total_steps))
    row.add_row(Text(progress.phases.current or "starting", style="bold"), bar, Text(ending))
    return row


def _figures(progress: Progress) -> RenderableType:
    lines = progress.ordered
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    reward = f"{_recent_reward(lines):.3f}  {sparkline([line.reward_mean for line in lines])}" if lines else "-"
    table.add_row("reward", reward)
    table.add_row("accuracy", _accuracy(progress) + _start(progress))
    table.add_row("staleness", _staleness(lines))
    table.add_row("buffer", f"{_buffer(progress.state)}; {_counts(progress.state)}")
    table.add_row("speed", _speed(progress))
    table.add_row("trainer waited", _waiting(progress))
    return table


def _processes(progress: Progress) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("process", "pid", "state", "processor", "memory", "peak"):
        table.add_column(name, justify="left" if name in ("process", "state") else "right")
    for process in progress.processes:
        cpu = "-" if process.cpu_s is None else whole_seconds(process.cpu_s)
        sizes = (megabytes(process.memory_bytes), megabytes(process.peak_bytes))
        table.add_row(process.name, str(process.pid), process.state, cpu, *sizes)
    return table


def _recent_reward(lines: Sequence[TrainerLine]) -> float:
    recent = lines[-10:]
    return sum(line.reward_mean for line in recent) / len(recent)


def _accuracy(progress: Progress) -> str:
    if not progress.evaluations:
        return "-"
    last = progress.evaluations[-1]
    greedy = next((e.greedy for e in reversed(progress.evaluations) if e.greedy is not None), None)
    return f"sampled {percent(last.sampled)}, greedy {percent(greedy)}"


def _start(progress: Progress) -> str:
    before = progress.before
    return f" (before: {percent(before.sampled)}, {percent(before.greedy)})" if before else ""


def _staleness(lines: Sequence[TrainerLine]) -> str:
    if not lines:
        return "-"
    mean = sum(line.staleness_mean for line in lines) / len(lines)
    return f"mean {mean:.2f}, max {max(line.staleness_max for line in lines)}"


def _buffer(state: dict[str, Any]) -> str:
    if not state:
        return "-"
    return f"{state['groups']['live']:,} groups, {state['tokens']['live']:,} tokens"


def _counts(state: dict[str, Any]) -> str:
    if not state:
        return "-"
    counts = group_counts(state)
    return f"stored {counts['stored']:,}, used {counts['used']:,}, dropped {counts['dropped']:,}"


def group_counts(state: dict[str, Any]) -> dict[str, int]:
    """Count groups of a run's state: stored, used (in a batch, freed since or not), dropped (evicted or dead), live."""
    groups = state["groups"]
    return {
        "stored": groups["stored"],
        "used": groups["in_batches"] + groups["retired"],
        "dropped": sum(groups["evicted"].values()) + groups["dead_lettered"],
        "live": groups["live"],
    }


def _speed(progress: Progress) -> str:
    rates = (progress.generated_tokens_per_s, progress.trained_tokens_per_s)
    generated, trained = ("-" if rate is None else f"{rate:,.0f} tok/s" for rate in rates)
    return f"generated {generated}, trained {trained}"


def _waiting(progress: Progress) -> str:
    waited = progress.waited()
    if not waited.seconds:
        return "0%"
    reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in waited.shares().items() if share >= 0.005)
    return f"{waited.share:.0%}" + (f" ({reasons})" if reasons else "")
