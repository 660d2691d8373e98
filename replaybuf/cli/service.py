"""What commands share that ask a service: its address and token, a client, tables, bars, and output as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replaybuf.client import Client
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.wait_reasons import WAIT_REASONS

RETRY_S = 60.0
"""Commands go on through the restart of a service."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The service to ask."""

    url: Annotated[str, Parameter(env_var="REPLAYBUF_URL")] = "http://127.0.0.1:8900"
    """Address of the service; separate several servers of one Redis by commas."""
    token: Annotated[str | None, Parameter(env_var="REPLAYBUF_TOKEN")] = dataclasses.field(default=None, repr=False)
    """Bearer token: role reader to look, operator to change."""
    json: bool = False
    """Print JSON."""


AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]
RunName = Annotated[str, Parameter(help="Name of the run.")]
StepNumber = Annotated[int, Parameter(help="Number of the step, from 0.")]
Service = Annotated[ServiceOptions, Parameter(name="*")]
DEFAULT_SERVICE = ServiceOptions()


def client(run: str, options: ServiceOptions) -> Client:
    """Return a client of a run."""
    return Client(options.url, run, options.token, retry_for_s=RETRY_S)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(msgspec.json.encode(value).decode())


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    console: Console | None = None,
) -> None:
    """Print rows; a name that starts with ">" is of a column of numbers.

    Text of users is shown as it is: no markup, no control characters.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row))
    (console or Console()).print(table if table.rows else "nothing to show")


def explain_waiting(waiting: WaitingAnswer) -> Iterator[str]:
    """Yield what the reason of a wait means with what to do, and its detail."""
    if reason := WAIT_REASONS.get(waiting.reason):  # a newer service may have others
        yield str(reason)
    if waiting.detail:
        yield printable(waiting.detail)


def printable(value: object) -> str:
    """Return text without control characters other than line breaks; None is "-"."""
    text = "-" if value is None else str(value)
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def draw_bar(share: float, width: int, console: Console) -> str:
    """Return a bar of `width` characters with this share filled; more than nothing shows at least a sliver."""
    share = min(1.0, max(0.0, share))
    if not (console.encoding or "").lower().startswith("utf"):
        return ("#" * max(round(share * width), 1 if share else 0)).ljust(width)
    eighths = max(round(share * width * 8), 1 if share else 0)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[part] if part else "")).ljust(width)
