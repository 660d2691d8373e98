"""Wire the command line: find the command, read its options, report errors.

Command modules are imported only when they run, so that `replaybuf --help` needs neither numpy nor torch.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, Token, convert

from replaybuf.cli.configuration import global_flags, sources
from replaybuf.errors import Invalid, ReplaybufError
from replaybuf.logs import LogFormat, configure_logging
from replaybuf.plugins import entry_points as plugins
from replaybuf.tracing import spans
from replaybuf.version import __version__

logger = logging.getLogger(__name__)

COMMANDS = {
    "serve": "replaybuf.cli.serve:serve",
    "status": "replaybuf.cli.status:status",
    "top": "replaybuf.cli.top.command:top",
    **{
        f"runs {name}": f"replaybuf.cli.runs:{name}"
        for name in ("show", "create", "pause", "resume", "finish", "delete")
    },
    "runs list": "replaybuf.cli.runs:list_",
    "runs set": "replaybuf.cli.runs:set_",
    "groups list": "replaybuf.cli.groups:list_",
    "groups show": "replaybuf.cli.groups:show",
    "groups failures": "replaybuf.cli.groups:failures",
    "ledger": "replaybuf.cli.groups:ledger",
    "explain": "replaybuf.cli.explain:explain",
    "doctor": "replaybuf.cli.doctor:doctor",
    "tokens new": "replaybuf.cli.tokens:new",
    "tokens list": "replaybuf.cli.tokens:list_",
    "tokens revoke": "replaybuf.cli.tokens:revoke",
    "token new": "replaybuf.cli.tokens:new",
    "strategies list": "replaybuf.cli.strategies:list_installed",
    "strategies show": "replaybuf.cli.strategies:show",
    "strategies check": "replaybuf.cli.strategies:check",
    "up": "replaybuf.cli.up:up",
    "completion": "replaybuf.cli.completion:completion",
    "config schema": "replaybuf.cli.config:schema",
    "generate": "replaybuf.cli.generate:generate",
    "stage": "replaybuf.cli.stage:stage",
    "eval": "replaybuf.cli.evaluate:evaluate",
    "export": "replaybuf.cli.export:export",
    "import": "replaybuf.cli.export:import_",
    "backup": "replaybuf.cli.backup:backup",
    "restore": "replaybuf.cli.backup:restore",
    "demo": "replaybuf.lab.demo.command:demo",
    "simulate": "replaybuf.lab.simulate.command:simulate",
}
"""Commands of this package by their words. Plug-ins add others through the entry-point group `replaybuf.commands`."""

app = App(
    name="replaybuf",
    help="A replay-buffer database for asynchronous reinforcement learning of language models.",
    version=__version__,
    result_action="return_value",
)
app.command(App(name="tokens", help="Create, list and revoke the bearer tokens of a service."))
app.command(App(name="token", help="Older name of tokens.", show=False))
app.command(App(name="config", help="Show what configuration files may hold."))
app.command(App(name="runs", help="List, show, create, change and delete runs."))
app.command(App(name="groups", help="List and show groups of a run, and why producers fail to make them."))
app.command(App(name="strategies", help="List, show and check strategies, filters and admission plug-ins."))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. An error is one message on standard error and exit code 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _mount(arguments)
        app.meta([*global_flags(app, arguments), *arguments])
    except ReplaybufError as error:
        print(f"replaybuf: {error.detail}", file=sys.stderr)
        logger.debug("error", exc_info=True)
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _mount(arguments: Sequence[str]) -> None:
    """Add every command by its import path. Summaries are read only where no single command is chosen."""
    installed = {name: plugins.find(plugins.COMMANDS, name).value for name in plugins.names(plugins.COMMANDS)}
    paths = COMMANDS | installed
    chosen = any(set(words.split()).issubset(arguments) for words in paths)
    for words, path in paths.items():
        group, _, name = words.rpartition(" ")
        parent = app[group] if group else app
        if name in parent:
            del parent[name]
        parent.command(path, name=name, help=None if chosen else _summary(path))


def _summary(path: str) -> str | None:
    """Read the first docstring line of MODULE:FUNCTION without importing the module."""
    module, _, function = path.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except ImportError:  # a plug-in with a missing dependency; its command reports that when it runs
        return None
    source = found.loader.get_source(module) if found and isinstance(found.loader, InspectLoader) else None
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return None


def _lower_case(type_: Any, tokens: Sequence[Token]) -> Any:
    """Accept INFO for info: manifests of other services write levels as Python's logging does."""
    return convert(type_, [token.evolve(value=token.value.lower()) for token in tokens])


@app.meta.default
def _run_command(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        Path | None,
        Parameter(
            help="TOML file with options, one table per command.", env_var="REPLAYBUF_CONFIG", show_env_var=False
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Parameter(
            help="Lowest level of log messages on standard error.",
            env_var="REPLAYBUF_LOG_LEVEL",
            show_env_var=False,
            converter=_lower_case,
        ),
    ] = "info",
    log_format: Annotated[
        LogFormat,
        Parameter(
            help="Form of log messages: text, or one JSON object per line.",
            env_var="REPLAYBUF_LOG_FORMAT",
            show_env_var=False,
        ),
    ] = "text",
    traces: Annotated[
        bool,
        Parameter(
            help="Export OpenTelemetry spans as the OTEL_... variables say; needs replaybuf[otel].",
            env_var="REPLAYBUF_TRACES",
            show_env_var=False,
            negative="",
        ),
    ] = False,
) -> object:
    configure_logging(log_level, log_format)
    app.config = sources(app, config)
    command, bound, unparsed = app.parse_args(tokens)
    rereads = {"reread": lambda: _parse_again(tokens, config)} if config is not None and "reread" in unparsed else {}
    if traces:
        spans.enable(f"replaybuf-{command.__name__}", getattr(bound.arguments.get("options"), "run", None) or "")
    try:
        return command(*bound.args, **bound.kwargs, **rereads)
    finally:
        spans.disable()


def _parse_again(tokens: tuple[str, ...], config: Path) -> dict[str, Any]:
    """Return the arguments of the command from the present configuration file and the same flags and environment."""
    app.config = sources(app, config)
    try:
        _, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise Invalid(f"config file {config}: {error}", name="config", value=str(config)) from error
    bound.apply_defaults()
    return dict(bound.arguments)
