"""Plug-ins by entry point: strategies, filters, admissions, environments, tasksets, commands.

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
from typing import Any, TypeVar

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.plugins.time_limit import CALL_LIMIT_S, PLUGIN_ERRORS, TookTooLong, call_twice_limited

T = TypeVar("T")

STRATEGIES = "replaybuf.strategies"
FILTERS = "replaybuf.filters"
ADMISSIONS = "replaybuf.admissions"
ENVIRONMENTS = "replaybuf.environments"
TASKSETS = "replaybuf.tasksets"
COMMANDS = "replaybuf.commands"
LOGPROBS = "replaybuf.logprobs"
LOSSES = "replaybuf.losses"
PUBLISHERS = "replaybuf.publishers"

_ADAPTERS = {(ENVIRONMENTS, "verifiers"): "verifiers", (TASKSETS, "verifiers"): "verifiers"}
"""Plug-ins with a documented name that are in a package of `adapters`."""


@functools.cache
def installed(group: str) -> EntryPoints:
    """Return the entry points of a group in all installed distributions; cached, because reading takes 15 ms."""
    return entry_points(group=group)


def names(group: str) -> list[str]:
    """List the names that installed distributions register in an entry-point group."""
    return sorted(installed(group).names)


def find(group: str, name: str) -> EntryPoint:
    """Return one entry point. Raises `Invalid` with the installed names, `MissingExtra` for one of an adapter."""
    matching = installed(group).select(name=name)
    if not matching:
        installed.cache_clear()  # it may have been installed since
        matching = installed(group).select(name=name)
    if not matching:
        kind = group.rpartition(".")[2].removesuffix("s").replace("ie", "y")
        if adapter := _ADAPTERS.get((group, name)):
            raise MissingExtra(f"the {kind} plug-in {name!r}", adapter=adapter)
        detail = f"{kind} is {name!r}; installed: {', '.join(names(group)) or 'none'}"
        raise Invalid(detail, name=kind, value=name, bound=names(group))
    return next(iter(matching))


def load(group: str, name: str) -> Any:
    """Import one plug-in. Raises `Invalid` if it is unknown or its import fails, `MissingExtra`."""
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


def configured(name: str, call: Callable[[], T]) -> T:
    """Return the result of a call to a plug-in while a run is configured; the call changes nothing.

    Raises `Invalid`, which names the plug-in, if it raises an error or is too slow twice.
    """
    with reported(name):
        try:
            return call_twice_limited(call)
        except TookTooLong as error:
            detail = f"plug-in {name!r}, when it was configured, {error}"
            raise Invalid(detail, name=name, value=name, bound=CALL_LIMIT_S) from error


@contextlib.contextmanager
def reported(name: str) -> Iterator[None]:
    """Turn an error of a plug-in during its configuration into `Invalid` with its name."""
    try:
        yield
    except Invalid:
        raise
    except PLUGIN_ERRORS as error:
        raise Invalid(f"plug-in {name!r} raised {error!r} when it was configured", name=name, value=name) from error
