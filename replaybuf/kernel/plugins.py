"""Everything that is found by entry point: strategies, filters, environments, commands.

The core knows plug-ins by name alone; built-ins come in through the same door as anybody's.
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
from replaybuf.kernel.time_limit import BOUND_S, IMPORT_BOUND_S, OURS, TookTooLong, bounded, bounded_again

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
    """Return what all installed distributions register in a group; read once, as it takes 15 ms."""
    return entry_points(group=group)


def names(group: str) -> list[str]:
    """List the names that installed distributions register in an entry-point group."""
    return sorted(installed(group).names)


def find(group: str, name: str) -> EntryPoint:
    """Return one entry point. Raises `Invalid` naming it and the installed ones."""
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
    """Import one plug-in. Raises `Invalid` where it is unknown or its import fails."""
    entry = find(group, name)
    try:
        return entry.load()
    except OURS:
        raise
    except BaseException as error:  # whatever a plug-in raises at import is its author's to read
        raise Invalid(f"{group} plug-in {name!r} ({entry.value}) does not import: {error!r}", name=name) from error


def is_object_path(text: str) -> bool:
    """Say whether `text` reads MODULE:NAME."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_object(path: str) -> Any:
    """Import what MODULE:NAME names, from the working directory too. Raises `Invalid` where that fails."""
    module, _, name = path.partition(":")
    if (here := str(Path.cwd())) not in sys.path:  # a console script, unlike python -m, does not look there
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name)
    except OURS:
        raise
    except BaseException as error:  # whatever a user's module raises at import is its author's to read
        raise Invalid(f"{path!r} does not import: {error!r}", name="import", value=path) from error


def option_pairs(texts: Iterable[str]) -> dict[str, Any]:
    """Read options written as KEY=VALUE; a value is JSON, or a word. Raises `Invalid`."""
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
    """What a strategy promises and the core enforces: its properties, read once."""

    max_staleness: int | None
    max_uses: int | None
    look_ahead: int


def build_strategy(name: str, options: dict[str, Any]) -> Strategy[Any]:
    """Build a strategy from its name and options. Raises what `build_with_bounds` does."""
    return build_with_bounds(name, options)[0]


def build_with_bounds(name: str, options: dict[str, Any]) -> tuple[Strategy[Any], Bounds]:
    """Build a strategy from its name and options, and read what it promises.

    Raises `Invalid` for an unknown name, a bad option, a class that does not build or not in time, and bounds that are
    none.
    """
    from replaybuf.kernel.strategy import Strategy

    strategy: Strategy[Any] = _build(STRATEGIES, name, options, Strategy)
    return strategy, bounds_of(name, strategy)


def bounds_of(name: str, strategy: Strategy[Any]) -> Bounds:
    """Read what a strategy promises. Raises `Invalid` where it is no bound."""
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
    """Build a filter from its name and options.

    Raises `Invalid` for an unknown name, a bad option, a class that does not build or not in time.
    """
    from replaybuf.kernel.strategy import Filter

    found: Filter[Any] = _build(FILTERS, name, options, Filter)
    return found


def _build(group: str, name: str, options: dict[str, Any], base: type[Strategy[Any]] | type[Filter[Any]]) -> Any:
    from replaybuf.kernel.options import check_options

    kind = base.__name__.lower()
    try:  # once: what an import that was ended has loaded does not come anew
        cls = bounded(lambda: load(group, name), IMPORT_BOUND_S)
    except TookTooLong as error:
        raise Invalid(f"import of {kind} {name!r} {error}", name=name, bound=IMPORT_BOUND_S) from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise Invalid(f"{kind} {name!r} is {cls!r}; it must be a subclass of {base.__name__}", name=kind, value=name)
    return configured(name, lambda: cls(check_options(name, options, cls.Options, kind=kind)))


def configured(name: str, call: Callable[[], T]) -> T:
    """Answer what a plug-in is asked while a run is configured, which changes nothing and so may be asked again.

    Raises `Invalid` with its name for whatever it raises, or too slow twice.
    """
    with reported(name):
        try:
            return bounded_again(call)
        except TookTooLong as error:
            raise Invalid(
                f"plug-in {name!r}, when it was configured, {error}", name=name, value=name, bound=BOUND_S
            ) from error


@contextlib.contextmanager
def reported(name: str) -> Iterator[None]:
    """Turn whatever a plug-in raises while it is configured into `Invalid` with its name."""
    try:
        yield
    except (Invalid, *OURS):
        raise
    except BaseException as error:  # whatever a plug-in raises is its author's to read
        raise Invalid(f"plug-in {name!r} raised {error!r} when it was configured", name=name, value=name) from error
