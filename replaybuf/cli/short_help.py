"""The help of a command: the options that a user needs first, and with --help-all all of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replaybuf.errors import counted

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

HELP_ALL = "--help-all"
FIRST_OPTIONS = {
    "serve": "host port data-dir redis-url tokens-file tls-cert tls-key advertise-url allowed-host durability"
    " tokenizer",
    "generate": "engine environment prompts tokenizer max-tokens url group-size temperature max-inflight-groups"
    " on-publish adapter token",
    "train": "model engine url checkpoint-dir weights-dir checkpoint-every-steps learning-rate loss loss-options steps"
    " lora-rank publisher token",
    "eval": "engine environment prompts tokenizer max-tokens samples temperature url json token",
    "fetch-weights": "engine folder host port publish-token url token on-publish",
    "simulate": "strategy option steps config-run from run report-dir slots group-s token-s json",
    "groups list": "contains state step min-reward max-reward version prompt-id order limit after url token json",
}
"""Options in the short help of commands with many; of other commands all are shown, required ones always."""


@dataclasses.dataclass(frozen=True)
class ShortHelp:
    """A help formatter of cyclopts that leaves out what is not needed first.

    `command`: its words; `every`: show all options.
    """

    command: str
    every: bool

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one panel of a help page."""
        from cyclopts.help import DefaultFormatter, HelpEntry

        for entry in panel.entries:
            _join_lines(entry)
        first = FIRST_OPTIONS.get(self.command)
        if panel.title == "Parameters" and first and not self.every:
            names = {f"--{name}" for name in first.split()}
            shown = [entry for entry in panel.entries if entry.required or names.intersection(entry.names)]
            rest = counted(len(panel.entries) - len(shown), "more option")
            more = f"Show {rest}: replaybuf {self.command} {HELP_ALL}"
            panel = panel.copy(entries=[*shown, HelpEntry(positive_names=(HELP_ALL,), description=more)])
        DefaultFormatter()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the usage line."""
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)


def _join_lines(entry: HelpEntry) -> None:
    """Let the terminal break the text of an option: cyclopts keeps line ends and indentation of its docstring."""
    from rich.text import Text

    text = getattr(entry.description, "primary_renderable", None)
    if isinstance(text, Text):
        text.plain = re.sub(r"\n +", " ", text.plain)


def help_for(words: Sequence[str], arguments: Sequence[str]) -> ShortHelp:
    """Return the formatter for a command line; `words`: of all commands."""
    chosen = max((command for command in words if set(command.split()).issubset(arguments)), key=len, default="")
    return ShortHelp(chosen, HELP_ALL in arguments)
