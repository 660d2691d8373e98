"""Plug-ins by entry point: strategies, filters, environments, commands.

The core knows plug-ins by name alone; built-ins are entry points as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from replaybuf.errors import Invalid
from replaybuf.kernel.time_limit import (
    CALL_LIMIT_S,
    IMPORT_LIMIT_S,
    PLUGIN_ERRORS,
    TookTooLong,
    call_limited,
    call_twice_limited,
)

if TYPE_CHECKING:  # the command line asks for names alone, and starts without numpy
    from replaybuf.kernel.strategy import Filter, Strategy

T = TypeVar("T")

STRATEGIES = "replaybuf.strategies"
FILTERS = "replaybuf.filters"
ENVIRONMENTS = "replaybuf.environments"
COMMANDS = "replaybuf.commands"
LOGPROBS = "replaybuf.logprobs"


@functools.cache
def installed(group: str) -> EntryPoints:
    """Return the entry points of a group in all installed distributions; cached, because reading takes 15 ms."""
    return entry_points(group=group)


def names(group: str) -> list[str]:
    """List the names that installed distributions register in an entry-point group."""
    return sorted(installed(group).names)


def find(group: str, name: str) -> EntryPoint:
    """Return one entry point. Raises `Invalid` with the installed names."""
    found = installed(group).select(name=name)
    if not found:
        installed.cache_clear()  # it may have been installed since
        found = installed(group).select(name=name)
    if not found:
        kind = group.rpartition(".")[2].removesuffix("s").replace("ie", "y")
        raise Invalid(
            f"{kind} is {name!r}; installed: {', '.join(names(group)) or 'none'}",
            name=kind,
            value=name,
            bound=names(group),
        )
    return next(iter(found))


def load(group: str, name: str) -> Any:
    """Import one plug-in. Raises `Invalid` if it is unknown or its import fails."""
    entry = find(group, name)
    try:
        return entry.load()
    except PLUGIN_ERRORS as error:
        raise Invalid(f"{group} plug-in {name!r} ({entry.value}) does not import: {error!r}", name=name) from error


def is_object_path(text: str) -> bool:
    """Return whether `text` has the form MODULE:NAME."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_object(path: str) -> Any:
    """Import the object MODULE:NAME, from the working directory too. Raises `Invalid` if that fails."""
    module, _, name = path.partition(":")
    if (here := str(Path.cwd())) not in sys.path:  # a console script, unlike python -m, does not look there
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name)
    except PLUGIN_ERRORS as error:
        raise Invalid(f"{path!r} does not import: {error!r}", name="import", value=path) from error


def option_pairs(texts: Iterable[str]) -> dict[str, Any]:
    """Parse options written as KEY=VALUE; a value is JSON, or a word. Raises `Invalid`."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Invalid(f"option is {text!r}; it must be KEY=VALUE", name="option", value=text, bound="KEY=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


class Bounds(NamedTuple):
    """Properties of a strategy that the core enforces, read once."""

    max_staleness: int | None
    max_uses: int | None
    look_ahead: int


def build_strategy(name: str, options: dict[str, Any]) -> Strategy[Any]:
    """Build a strategy from its name and options. Raises `Invalid`."""
    return build_with_bounds(name, options)[0]


def build_with_bounds(name: str, options: dict[str, Any]) -> tuple[Strategy[Any], Bounds]:
    """Build a strategy from its name and options, and read its bounds.

    Raises `Invalid` for an unknown name, an invalid option or bound, and a class that fails or is too slow.
    """
    from replaybuf.kernel.strategy import Strategy

    strategy: Strategy[Any] = _build(STRATEGIES, name, options, Strategy)
    return strategy, bounds_of(name, strategy)


def bounds_of(name: str, strategy: Strategy[Any]) -> Bounds:
    """Read the bounds of a strategy. Raises `Invalid` for an invalid one."""
    found = configured(name, lambda: Bounds(strategy.max_staleness, strategy.max_uses, strategy.look_ahead))
    for what, value, least, unbounded in zip(Bounds._fields, found, (0, 1, 0), (True, True, False), strict=True):
        if not ((type(value) is int and value >= least) or (unbounded and value is None)):
            raise Invalid(
                f"{what} of strategy {name!r} is {value!r}; it must be a whole number >= {least}"
                + (" or None" if unbounded else ""),
                name=f"strategy.{what}",
                value=repr(value),
                bound=least,
            )
    return found


def build_filter(name: str, options: dict[str, Any]) -> Filter[Any]:
    """Build a filter from its name and options. Raises `Invalid`, as `build_with_bounds`."""
    from replaybuf.kernel.strategy import Filter

    found: Filter[Any] = _build(FILTERS, name, options, Filter)
    return found


def _build(group: str, name: str, options: dict[str, Any], base: type[Strategy[Any]] | type[Filter[Any]]) -> Any:
    from replaybuf.kernel.options import check_options

    kind = base.__name__.lower()
    try:  # once: modules loaded before the interruption would not be imported again
        cls = call_limited(lambda: load(group, name), IMPORT_LIMIT_S)
    except TookTooLong as error:
        raise Invalid(f"import of {kind} {name!r} {error}", name=name, bound=IMPORT_LIMIT_S) from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise Invalid(f"{kind} {name!r} is {cls!r}; it must be a subclass of {base.__name__}", name=kind, value=name)
    return configured(name, lambda: cls(check_options(name, options, cls.Options, kind=kind)))


def configured(name: str, call: Callable[[], T]) -> T:
    """Return the result of a call to a plug-in while a run is configured; the call changes nothing.

    Raises `Invalid` naming the plug-in for whatever it raises, and if it is too slow twice.
    """
    with reported(name):
        try:
            return call_twice_limited(call)
        except TookTooLong as error:
            raise Invalid(
                f"plug-in {name!r}, when it was configured, {error}", name=name, value=name, bound=CALL_LIMIT_S
            ) from error


@contextlib.contextmanager
def reported(name: str) -> Iterator[None]:
    """Turn whatever a plug-in raises while it is configured into `Invalid` with its name."""
    try:
        yield
    except Invalid:
        raise
    except PLUGIN_ERRORS as error:
        raise Invalid(f"plug-in {name!r} raised {error!r} when it was configured", name=name, value=name) from error
