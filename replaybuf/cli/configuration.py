"""Read options from environment variables and from the TOML file of `--config`.

Order: file, environment, flags; the later wins. `replaybuf serve --port 9000` is `REPLAYBUF_SERVE_PORT=9000` is
`port = 9000` under `[serve]` in the file of `--config`, `REPLAYBUF_SERVE_CONFIG` or `REPLAYBUF_CONFIG`.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, Argument, ArgumentCollection
from cyclopts.config import Dict, Env

from replaybuf.errors import Invalid
from replaybuf.files import CONFIG_BYTES, read_bounded

logger = logging.getLogger(__name__)

GLOBAL_OPTIONS = ("config", "log-level", "log-format", "traces")
"""Options of every command."""
RUN_OPTION = "--run"
"""Hidden name of the argument RUN of `generate`, `train`, `eval` and `fetch-weights`."""


def sources(app: App, config: Path | None) -> tuple[Any, ...]:
    """Return where cyclopts reads options from, besides the flags. Raises `Invalid` for a broken file."""
    environment = _Environment("REPLAYBUF_")
    files = () if config is None else (_File(_read_tables(app, config), source=str(config.absolute())),)
    return _place_run, environment, _place_run, *files, _place_run, _check_missing


def global_flags(app: App, arguments: Sequence[str]) -> list[str]:
    """Turn the variables `REPLAYBUF_COMMAND_CONFIG` and `REPLAYBUF_COMMAND_LOG_LEVEL` into flags.

    They win over `REPLAYBUF_CONFIG` and `REPLAYBUF_LOG_LEVEL`; a flag in `arguments` wins over them.
    """
    command = next((word for word in arguments if word in app and not word.startswith("-")), None)
    flags: list[str] = []
    for option in GLOBAL_OPTIONS:
        value = os.environ.get(f"REPLAYBUF_{command}_{option}".upper().replace("-", "_"))
        if value and not any(argument.partition("=")[0] == f"--{option}" for argument in arguments):
            flags.append(f"--{option}={value}")
    return flags


def _place_run(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take the argument RUN of a command as its option --run.

    After each source, which may set either, so that a flag wins over the environment and that over the file.
    """
    argument, option = _run_of(arguments)
    if argument and option and argument.has_tokens and not option.has_tokens:
        option.append(argument.tokens[0].evolve(keyword=RUN_OPTION))


def _run_of(arguments: ArgumentCollection) -> tuple[Argument | None, Argument | None]:
    by_name = {argument.name: argument for argument in arguments}
    return by_name.get("RUN"), by_name.get(RUN_OPTION)


def _check_missing(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise `Invalid` with all options and arguments that a command still needs: cyclopts names the first alone."""
    needed = [argument for argument in arguments if argument.required and not argument.children]
    missing = [argument.name for argument in needed if not argument.has_tokens]
    if all(_run_of(arguments)):
        missing = ["RUN" if name == RUN_OPTION else name for name in missing]
    if missing:
        command = f"replaybuf {' '.join(commands)}"
        detail = f"{command} needs {', '.join(missing)}; see {command} --help"
        raise Invalid(detail, name=missing[0], value=None, bound=missing)


class _Environment(Env):
    """Options from environment variables. Unknown variables with a command's prefix are logged.

    They are not errors: Kubernetes sets `REPLAYBUF_SERVE_SERVICE_HOST` for a service named `replaybuf-serve`.
    """

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill `arguments` from the environment. Hyphens of a command's name are underscores there."""
        words = tuple(word.replace("-", "_") for word in commands)
        super().__call__(app, words, arguments)
        if not commands:
            return
        prefix = "".join(f"{word}_" for word in (self.prefix.rstrip("_"), *words)).upper()
        options = {*GLOBAL_OPTIONS, *(argument.name.lstrip("-") for argument in arguments)}
        allowed = {prefix + option.replace("-", "_").upper() for option in options}
        for name in sorted(os.environ):
            if name.startswith(prefix) and name not in allowed:
                near = difflib.get_close_matches(name, allowed, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                logger.warning("environment variable %s is not an option of %s%s", name, " ".join(commands), hint)


class _File(Dict):
    """Options from the tables of a file. An option that is itself a table becomes JSON, as its flag has it."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill `arguments` from the table of the command."""
        Dict(_with_json(self.data, len(commands)), source=self.source)(app, commands, arguments)


def _with_json(node: Any, depth: int) -> Any:
    """Write the tables more than `depth` levels below as JSON."""
    if not isinstance(node, dict):
        return node
    if depth < 0:
        return json.dumps(node, default=str)
    return {key: _with_json(value, depth - 1) for key, value in node.items()}


def _read_tables(app: App, path: Path) -> dict[str, Any]:
    """Read a file. Raises `Invalid` if it is not TOML, or has anything but one table per command.

    The keys of a table are checked when its command runs: plug-in commands are imported only then.
    """
    try:
        tables = tomllib.loads(read_bounded(path, CONFIG_BYTES).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise Invalid(f"config file {path} cannot be read: {cause}", name="config", value=str(path)) from error
    commands = sorted(name for name in app if not name.startswith("-"))
    for name, table in tables.items():
        if name not in commands or not isinstance(table, dict):
            what = f"an unknown table [{name}]" if isinstance(table, dict) else f"the key {name!r} outside the tables"
            raise Invalid(
                f"config file {path} has {what}; each option belongs into the table of its command: "
                f"{', '.join(commands)}",
                name="config",
                value=name,
                bound=commands,
            )
    return tables
