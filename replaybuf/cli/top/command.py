"""The command `replaybuf top`: one frame without a terminal, else a live view with keys."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, Group
from rich.live import Live

from replaybuf.cli.service import ServiceOptions, print_json
from replaybuf.cli.top.keyboard import Keyboard
from replaybuf.cli.top.poller import Frame, Poller, ask
from replaybuf.cli.top.screen import Screen
from replaybuf.cli.top.view import draw, keys_line
from replaybuf.client.addresses import addresses_of
from replaybuf.wire.config import check_run_name

REDRAWN_S = 1.0
"""Ages grow on the screen also while no answer comes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopOptions(ServiceOptions):
    """How to watch."""

    every_s: Annotated[float, Parameter(validator=Number(gte=0.1, lte=3600))] = 2.0
    """Seconds between two questions to the service."""
    once: bool = False
    """Print one frame and end, as without a terminal."""


def top(
    run: Annotated[str | None, Parameter(help="Run to open. Default: the list of all runs.")] = None,
    /,
    options: Annotated[TopOptions, Parameter(name="*")] = TopOptions(),
) -> None:
    """Watch all runs, or the flow of one run: what moves, and what it waits for.

    Keys: up and down select a run, enter opens it, escape goes back, s sorts, q ends.
    """
    run, addresses = check_run_name(run) if run else "", addresses_of(options.url)
    console = Console()
    if options.once or options.json or not console.is_terminal:
        frame = ask(addresses, options.token, run)
        if options.json:
            print_json(frame.flow or frame.overview)
        else:
            console.print(draw(frame, Screen(run), console, options.url, frame.at_s))
        return
    with Poller(addresses, options.token, run, options.every_s) as poller:
        _watch(poller, Screen(run, run), console, options.url)


def _watch(poller: Poller, screen: Screen, console: Console, url: str) -> None:
    """Draw after each answer and each key until the person ends it."""
    keyboard = Keyboard()
    with keyboard.reading(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.ended:
            live.update(_picture(poller.frame, screen, console, url), refresh=True)
            keys = keyboard.wait(REDRAWN_S, poller.wake)
            poller.clear_wake()
            overview = poller.frame.overview
            for key in keys:
                screen.press(key, overview.runs if overview else [])
            poller.show(screen.run)


def _picture(frame: Frame, screen: Screen, console: Console, url: str) -> Group:
    return Group(draw(frame, screen, console, url, time.monotonic()), keys_line(screen))
