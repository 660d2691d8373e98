"""The command `replaybuf completion`: the script that lets a shell complete commands and options."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from replaybuf.cli.main import app
from replaybuf.errors import Invalid
from replaybuf.plugins import entry_points as plugins


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Shell to complete in.")], /) -> None:
    """Print the completion script of a shell.

    bash: `replaybuf completion bash > ~/.local/share/bash-completion/completions/replaybuf`. zsh: write it to a file
    `_replaybuf` in a folder of `$fpath`. fish: write it to `~/.config/fish/completions/replaybuf.fish`.
    """
    _drop_broken_plugins()
    print(app.generate_completion(shell=shell))


def _drop_broken_plugins() -> None:
    """Leave out commands of plug-ins that cannot be imported: the others complete all the same."""
    for name in plugins.names(plugins.COMMANDS):
        try:
            plugins.load(plugins.COMMANDS, name)
        except Invalid as error:
            print(f"replaybuf: command {name} is left out: {error.detail}", file=sys.stderr)
            del app[name]
