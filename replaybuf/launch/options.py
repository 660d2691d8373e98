"""Options of commands as keys of a TOML section, read from the options dataclass of each command.

The dataclass stays the only place of an option: its name, type, bounds, default and help text. Keys are flags with
`_` instead of `-`, as in the file of `--config`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from cyclopts import App, Argument, CycloptsError, Parameter
from cyclopts.validators import Number
from msgspec import Meta

from replaybuf.errors import Invalid, ReplaybufError
from replaybuf.generator.options import EvaluateOptions, GenerateOptions
from replaybuf.option_types import ListenAddress
from replaybuf.plugins import entry_points as plugins
from replaybuf.service.options import ServeOptions

_BUILT_IN = {"serve": ServeOptions, "generate": GenerateOptions, "eval": EvaluateOptions}
_BOUNDS = {"gt": "gt", "gte": "ge", "lt": "lt", "lte": "le"}


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option of a command. `default` None: it has none, it is null, or it differs between machines."""

    key: str
    flag: str
    no_flag: str
    hint: Any
    help: str
    required: bool
    default: Any
    secret: bool


@functools.cache
def options_of(command: str) -> Mapping[str, Option]:
    """Return the options of a command by their keys. Raises `Invalid` for a command without an options dataclass."""
    secret = _secret_names(_dataclass_of(command))
    arguments = _app(command).assemble_argument_collection(parse_docstring=True)
    options = [_option(argument, secret) for argument in arguments if argument.parse and argument.name != "*"]
    return {option.key: option for option in options}


def words(command: str, values: Mapping[str, Any]) -> list[str]:
    """Return the flags for these values, without those of secret options."""
    options = options_of(command)
    return [word for key, value in values.items() if not options[key].secret for word in _flags(options[key], value)]


def secrets(command: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Return environment variables for the secret options among these values: command lines are visible to others."""
    options = options_of(command)
    return {f"REPLAYBUF_{command}_{key}".upper(): str(v) for key, v in values.items() if options[key].secret}


def check(command: str, values: Mapping[str, Any]) -> None:
    """Check values as the command itself does. Raises `Invalid`."""
    arguments = [word for key, value in values.items() for word in _flags(options_of(command)[key], value)]
    try:
        _, bound, _ = _app(command).parse_args(arguments, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise Invalid(str(error), name=command) from error
    options = bound.arguments["options"]
    if hasattr(options, "check"):
        options.check()


def _flags(option: Option, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield option.flag if value else option.no_flag
        return
    for item in value if isinstance(value, list) else [value]:
        text = json.dumps(item, default=str) if isinstance(item, dict) else str(item)
        yield from (f"{option.flag}={text}",) if text.startswith("-") else (option.flag, text)


def _option(argument: Argument, secret: frozenset[str]) -> Option:
    flag, hint = argument.name, argument.hint
    validators = argument.parameter.validator
    bounds = {
        _BOUNDS[name]: value
        for number in (validators if isinstance(validators, tuple) else (validators,))
        if isinstance(number, Number)
        for name in _BOUNDS
        if (value := getattr(number, name)) is not None
    }
    default = argument.field_info.default
    # `--help` hides a default of this machine, such as a host name.
    absent = default is inspect.Parameter.empty or default is None or argument.parameter.show_default is False
    plain = _toml_type(hint)
    return Option(
        key=flag.removeprefix("--").replace("-", "_"),
        flag=flag,
        no_flag=next(iter(argument.negatives), ""),
        hint=Annotated[plain, Meta(**bounds)] if bounds else plain,
        help=" ".join((argument.parameter.help or "").split()),
        required=argument.field_info.required,
        default=None if absent else str(default) if isinstance(default, Path) else default,
        secret=argument.keys[-1] in secret,
    )


def _toml_type(hint: Any) -> Any:
    """Return the type of a value in TOML, which has no paths, addresses, tuples and nulls."""
    if hint is Path:
        return str
    if hint is ListenAddress:
        return str | int
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return Union[tuple(_toml_type(part) for part in arguments if part is not type(None))]  # noqa: UP007 - a value
    if origin in (tuple, list):
        return list[_toml_type(arguments[0])]  # type: ignore[misc]
    return hint


@functools.cache
def _app(command: str) -> App:
    def run(options: Any) -> None:
        """Take the options; the annotation is set below."""

    shape = _dataclass_of(command)
    run.__annotations__ = {"options": Annotated[shape, Parameter(name="*")]}
    if not any(field.default is field.default_factory is dataclasses.MISSING for field in dataclasses.fields(shape)):
        run.__defaults__ = (shape(),)  # cyclopts wants a default where no option is required
    return App(name=command, default_command=run)


def _dataclass_of(command: str) -> type:
    """Find the options of a command of this package, or of a plug-in by the annotation of its function."""
    if command in _BUILT_IN:
        return _BUILT_IN[command]
    hint = get_type_hints(plugins.load(plugins.COMMANDS, command)).get("options")
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        raise ReplaybufError(f"the command {command} has no options dataclass", name=command)
    return hint


def _secret_names(shape: Any) -> frozenset[str]:
    """Return the fields that the dataclass keeps out of its `repr`, also of dataclasses in it."""
    names: set[str] = set()
    for field in dataclasses.fields(shape):
        if not field.repr:
            names.add(field.name)
        inner = get_type_hints(shape)[field.name]
        if dataclasses.is_dataclass(inner):
            names |= _secret_names(inner)
    return frozenset(names)
