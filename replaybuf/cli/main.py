"""The command line. Every option can also come from the environment and from a TOML file.

Order: file, environment, flags; the later wins. `replaybuf serve --port 9000` is `REPLAYBUF_SERVE_PORT=9000` is
`port = 9000` under `[serve]` in the file named by `--config`, `REPLAYBUF_SERVE_CONFIG` or `REPLAYBUF_CONFIG`.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib.util
import logging
import os
import sys
import tomllib
from collections.abc import Sequence
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter, Token, convert
from cyclopts.config import Env, Toml
from cyclopts.types import NonNegativeInt, Port
from rich.console import Console

from replaybuf import __version__
from replaybuf.errors import Invalid, ReplaybufError, first_error
from replaybuf.kernel import plugins

logger = logging.getLogger(__name__)

app = App(
    name="replaybuf",
    help="A replay-buffer database for asynchronous reinforcement learning of language models.",
    version=__version__,
    result_action="return_value",
)
token_app = App(name="token", help="Bearer tokens of a service.")
app.command(token_app)
strategies_app = App(name="strategies", help="What is installed, what it takes, whether it is sound.")
app.command(strategies_app)


@app.command
def serve(
    *,
    host: str = "127.0.0.1",
    port: Port = 8900,
    tcp: bool = True,
    uds: Path | None = None,
    data_dir: Path = Path(".replaybuf/data"),
    redis_url: str | None = None,
    tokens_file: Path | None = None,
    advertise_url: str | None = None,
    history_groups: NonNegativeInt = 100_000,
    durability: Literal["strict", "relaxed"] = "strict",
    wait_replicas: int = 0,
    wait_timeout_s: float = 2.0,
    tokenizer: Path | None = None,
) -> None:
    """Run the service until SIGTERM or SIGINT.

    Prints "listening on http://HOST:PORT" and "listening on unix:PATH" once it answers.

    Parameters
    ----------
    host
        Address to listen on. Without a tokens file only loopback is taken.
    port
        Port to listen on; 0 takes a free one.
    tcp
        Listen on host and port; without it on the unix socket alone.
    uds
        Unix socket to listen on, for this user alone; clients on this machine take unix:PATH as address.
    data_dir
        Folder of the private Valkey that is started where no Redis URL is given.
    redis_url
        Redis >= 7.0 or Valkey >= 8 to use: redis://HOST:PORT/DB, rediss://..., unix:///PATH.
    tokens_file
        Tokens that callers must show; made by "replaybuf token new".
    advertise_url
        Address that other servers on the same Redis tell their clients when this one leads; where it listens, if unset.
    history_groups
        How many freed groups of each run stay to be looked at, with the records of their batches.
    durability
        What an acknowledged write is to survive: strict = kill -9 of everything, Redis included; relaxed = all but the
        last second of Redis.
    wait_replicas
        How many replicas of Redis must have a write before it is acknowledged.
    wait_timeout_s
        How long a write waits to be confirmed, in seconds, before it is answered 503 not-durable.
    tokenizer
        Model folder with a tokenizer.json, to show the groups that are looked at as text too.
    """
    from replaybuf.service.host import ServeOptions
    from replaybuf.service.server import serve as run_server

    options = ServeOptions(
        host=host,
        port=port,
        tcp=tcp,
        uds=str(uds) if uds else None,
        data_dir=str(data_dir),
        redis_url=redis_url,
        tokens_file=str(tokens_file) if tokens_file else None,
        advertise_url=advertise_url,
        history_groups=history_groups,
        durability=durability,
        wait_replicas=wait_replicas,
        wait_timeout_s=wait_timeout_s,
        tokenizer=str(tokenizer) if tokenizer else None,
    )
    _run(run_server(options))


@app.command
def status(*, url: str = "http://127.0.0.1:8900", run: str | None = None, token: str | None = None) -> None:
    """Show the runs of a service: what each one holds and what it waits for.

    Parameters
    ----------
    url
        Address of the service; several servers of one Redis: with commas between.
    run
        Name of one run; all of them where it is left out.
    token
        Bearer token with the role reader, trainer or operator.
    """
    from replaybuf.cli.status import show

    show(url, run, token, Console())


@app.command
def doctor(
    *,
    redis_url: str | None = None,
    data_dir: Path = Path(".replaybuf/data"),
    host: str = "127.0.0.1",
    port: Port = 8900,
) -> None:
    """Check this machine and its Redis for what a service needs, and say what to do.

    Ends with exit code 1 where something keeps a service from working.

    Parameters
    ----------
    redis_url
        Redis to check; without it the embedded Valkey is started in a scratch folder and checked.
    data_dir
        Folder a service would keep its data in.
    host
        Address a service would listen on.
    port
        Port a service would listen on.
    """
    from replaybuf.cli.doctor import examine

    if not _run(examine(redis_url, data_dir, host, port, Console())):
        sys.exit(1)


@token_app.command(name="new")
def token_new(*, role: str, name: str, tokens_file: Path) -> None:
    """Make a token, print it once and store its hash.

    Parameters
    ----------
    role
        producer, trainer, reader or operator.
    name
        Who holds it; shown in messages.
    tokens_file
        File to add it to; "replaybuf serve --tokens-file" reads it at start.
    """
    from replaybuf.service.http.auth import new_token

    print(new_token(role, name, tokens_file))


@strategies_app.command(name="list")
def strategies_list() -> None:
    """List the installed strategies and filters: name, distribution, what they do.

    Ends with exit code 1 where one of them does not import.
    """
    from replaybuf.cli.catalog import show_list

    if not show_list(Console()):
        sys.exit(1)


@strategies_app.command(name="show")
def strategies_show(name: str, /) -> None:
    """Show a strategy or filter: what it does, what it promises, its options with types, defaults and ranges.

    Parameters
    ----------
    name
        Name as "replaybuf strategies list" tells it.
    """
    from replaybuf.cli.catalog import show_strategy

    show_strategy(name, Console())


@strategies_app.command(name="check")
def strategies_check(target: str, /, *, option: Annotated[list[str], Parameter(negative="")] = []) -> None:  # noqa: B006
    """Hold a strategy or filter that is not installed to the contract; needs the extra "testing".

    Ends with exit code 1 where it breaks a rule.

    Parameters
    ----------
    target
        Class as MODULE:CLASS, found in the working folder too.
    option
        Option KEY=VALUE to build it with.
    """
    from replaybuf.cli.catalog import check_class
    from replaybuf.kernel.plugins import option_pairs

    if not check_class(target, option_pairs(option), Console()):
        sys.exit(1)


_ON_DEMAND = {
    "generate": "replaybuf.cli.generate:generate",
    "eval": "replaybuf.cli.evaluate:evaluate_command",
    "demo": "replaybuf.lab.demo.command:demo",
    "simulate": "replaybuf.lab.simulate.command:simulate",
}
"""Commands that are imported when they are run, as those of plug-ins: numpy and more come with them."""


def _mount_on_demand(arguments: Sequence[str]) -> None:
    """Mount what is imported when it is run. Where no command is named all are listed, so summaries are read then."""
    paths = _ON_DEMAND | {name: plugins.find(plugins.COMMANDS, name).value for name in plugins.names(plugins.COMMANDS)}
    overview = {*app, *paths}.isdisjoint(argument for argument in arguments if not argument.startswith("-"))
    for name, path in paths.items():
        if name in app:
            del app[name]
        app.command(path, name=name, help=_summary(path) if overview else None)


def _summary(path: str) -> str | None:
    """Read the first line of what documents MODULE:FUNCTION, without importing the module."""
    module, _, function = path.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except ImportError:  # a plug-in that lacks something: told when it is run
        return None
    source = found.loader.get_source(module) if found and isinstance(found.loader, InspectLoader) else None
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return None


_OF_EVERY_COMMAND = ("config", "log-level")


def _as_flags(arguments: Sequence[str]) -> list[str]:
    """Read the options of every command from the variables of the one that is run: `REPLAYBUF_SERVE_CONFIG`.

    They beat `REPLAYBUF_CONFIG`, and a flag beats them.
    """
    command = next((word for word in arguments if word in app and not word.startswith("-")), None)
    flags: list[str] = []
    for option in _OF_EVERY_COMMAND:
        value = os.environ.get(f"REPLAYBUF_{command}_{option}".upper().replace("-", "_"))
        if value and not any(argument.partition("=")[0] == f"--{option}" for argument in arguments):
            flags += [f"--{option}", value]
    return flags


def _in_lower_case(type_: Any, tokens: Sequence[Token]) -> Any:
    """Read INFO as info: manifests of other services write levels as Python's logging does."""
    return convert(type_, [token.evolve(value=token.value.lower()) for token in tokens])


@app.meta.default
def _with_config(
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
            help="What is logged, on standard error.",
            env_var="REPLAYBUF_LOG_LEVEL",
            show_env_var=False,
            converter=_in_lower_case,
        ),
    ] = "info",
) -> object:
    _configure_logging(log_level)
    app.config = _sources(config)
    command, bound, unparsed = app.parse_args(tokens)
    if config is not None and "reread" in unparsed:
        return command(*bound.args, **bound.kwargs, reread=lambda: _parsed_again(tokens, config))
    return command(*bound.args, **bound.kwargs)


class _Environment(Env):
    """Options from variables of the environment. One that begins as a command's do but is none of them is logged.

    It is not refused: Kubernetes sets `REPLAYBUF_SERVE_SERVICE_HOST` where a service is named `replaybuf-serve`.
    """

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what the environment has."""
        super().__call__(app, commands, arguments)
        if not commands:
            return
        prefix = "".join(f"{word}_" for word in (self.prefix.rstrip("_"), *commands)).upper()
        options = {*_OF_EVERY_COMMAND, *(argument.name.lstrip("-") for argument in arguments)}
        known = {prefix + option.replace("-", "_").upper() for option in options}
        for name in sorted(os.environ):
            if name.startswith(prefix) and name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                logger.warning("environment variable %s is no option of %s%s", name, " ".join(commands), hint)


def _sources(config: Path | None) -> tuple[object, ...]:
    if config is None:
        return (_Environment("REPLAYBUF_"),)
    _check_toml(config)
    return _Environment("REPLAYBUF_"), Toml(config, must_exist=True, search_parents=False)


def _parsed_again(tokens: tuple[str, ...], config: Path) -> dict[str, Any]:
    """Return the arguments of the command as the configuration file has them now, flags and environment as before."""
    app.config = _sources(config)
    try:
        _, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise Invalid(f"config file {config}: {error}", name="config", value=str(config)) from error
    bound.apply_defaults()
    return dict(bound.arguments)


def _check_toml(path: Path) -> None:
    """Raise `Invalid` for a file that is no TOML, or that has something beside the tables of commands.

    What is in the table of a command is checked when that command is run: plug-ins are imported only then.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise Invalid(f"config file {path} cannot be read: {error.strerror}", name="config", value=str(path)) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Invalid(f"config file {path} cannot be read: {error}", name="config", value=str(path)) from error
    commands = sorted(name for name in app if not name.startswith("-"))
    for name, table in tables.items():
        if name not in commands or not isinstance(table, dict):
            kind = f"table [{name}]" if isinstance(table, dict) else f"key {name!r} outside the tables"
            raise Invalid(
                f"config file {path} has a {kind}; options stand in the table of their command: {', '.join(commands)}",
                name="config",
                value=name,
                bound=commands,
            )


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr, force=True
    )
    for noisy in ("httpx", "httpcore", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def _run(main: object) -> object:
    """Own the event loop of this process; unpack the one error that a task group wraps."""
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)  # type: ignore[arg-type]
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors end with one message on standard error and exit code 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _mount_on_demand(arguments)
        app.meta([*_as_flags(arguments), *arguments])
    except ReplaybufError as error:
        print(f"replaybuf: {error.detail}", file=sys.stderr)
        logger.debug("error", exc_info=True)
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
