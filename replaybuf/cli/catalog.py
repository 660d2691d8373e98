"""`replaybuf strategies`: which are installed, what one of them takes, whether a new one keeps the contract."""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replaybuf.errors import Invalid, MissingExtra, ReplaybufError, StrategyFault
from replaybuf.kernel import plugins
from replaybuf.kernel.options import REQUIRED, StrategyOptions, check_options, describe_options
from replaybuf.kernel.strategy import Filter, Strategy
from replaybuf.kernel.time_limit import OURS

SUITE = "replaybuf.testing"
_CHECKS = {
    "check_strategy": "keeps the rules of a strategy, over random buffers",
    "check_progress": "neither waits for ever nor starves slow prompts, in a closed loop",
    "check_filter": "keeps the rules of a filter, over random groups",
}
"""Functions of the suite, and what they are told as."""
_KINDS = {"strategy": plugins.STRATEGIES, "filter": plugins.FILTERS}


def show_list(console: Console) -> bool:
    """Print each installed strategy and filter: first line, where it comes from; False where one does not import."""
    good = True
    for kind, group in _KINDS.items():
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in (kind, "from", "what it does"):
            table.add_column(heading, header_style="dim", no_wrap=heading == kind, overflow="fold")
        for name in plugins.names(group):
            entry = plugins.find(group, name)
            try:
                told = Text(_first_line(plugins.load(group, name)))
            except ReplaybufError as error:
                told, good = Text(error.detail, style="red"), False
            table.add_row(name, Text(_origin(entry)), told)
        console.print(table)
        console.print()
    return good


def show_strategy(name: str, console: Console) -> None:
    """Print what a strategy, or a filter, does, what it promises by default and its options. Raises `Invalid`."""
    group = plugins.FILTERS if name in plugins.names(plugins.FILTERS) else plugins.STRATEGIES
    if name not in plugins.names(group):
        installed = {kind: plugins.names(of_kind) for kind, of_kind in _KINDS.items()}
        told = "; ".join(f"{kind}: {', '.join(its)}" for kind, its in installed.items())
        raise Invalid(f"name is {name!r}; installed: {told}", name="name", value=name, bound=installed)
    entry, cls = plugins.find(group, name), plugins.load(group, name)
    console.print(Text(f"{name}  ({entry.value}, {_origin(entry)})", style="bold"), soft_wrap=True)
    console.print(Text(_unwrapped(inspect.getdoc(cls) or "no docstring")))
    console.print()
    needs_some = any(option.default == REQUIRED for option in describe_options(cls.Options))
    if group == plugins.STRATEGIES and not needs_some:
        with_defaults = _built(cls, name, {})
        bounds = plugins.bounds_of(name, with_defaults)._asdict()
        promised = ", ".join(f"{what} {_or_unbounded(bound)}" for what, bound in bounds.items())
        console.print(Text(f"by default: {promised}"))
    options = describe_options(cls.Options)
    if not options:
        console.print("no options")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("option", "what it may be", "default"):
        table.add_column(heading, header_style="dim")
    for option in options:
        table.add_row(*(Text(cell) for cell in option))
    console.print(table)
    if cls.Options.__doc__ and cls.Options is not StrategyOptions:
        console.print(Text(_unwrapped(inspect.getdoc(cls.Options) or "")))


def check_class(target: str, options: dict[str, Any], console: Console) -> bool:
    """Hold a class that is not installed yet to the contract; print each finding; True where all is well.

    `target` is MODULE:CLASS; modules of the working folder are found too. Raises `Invalid` where it does not import.
    """
    cls = _import(target)
    good = True
    for what, fault in _findings(cls, target, options):
        good = good and not fault
        mark = Text("fail" if fault else "ok", style="red" if fault else "green")
        console.print(Text.assemble(mark, f"  {what}", f": {fault}" if fault else ""), soft_wrap=True)
        if fault:
            break  # what follows would stumble over the same
    return good


def _findings(cls: Any, target: str, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is checked and, where it does not hold, the fault."""
    kinds = (Strategy, Filter)
    is_kind = isinstance(cls, type) and issubclass(cls, kinds)
    yield (
        "is a strategy or a filter",
        "" if is_kind else f"{target} is no subclass of replaybuf.strategy.Strategy",
    )
    yield "says what it does", "" if cls.__doc__ else "the class has no docstring"
    yield "has frozen options that refuse unknown names", _fault_of_options(cls.Options)
    try:
        built = _built(cls, target, options)
    except ReplaybufError as error:
        yield "builds from its options", f"{error.detail}; give required ones with --option KEY=VALUE"
        return
    yield "builds from its options", ""
    yield from _suite(cls, built, target, options)


def _suite(cls: Any, built: Any, target: str, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Run the contract suite. Raises `MissingExtra`."""
    try:
        testing = importlib.import_module(SUITE)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the contract suite {SUITE}", "testing") from error
    names = ("check_strategy", "check_progress") if isinstance(built, Strategy) else ("check_filter",)
    for name in names:
        fault = ""
        try:
            getattr(testing, name)(lambda: _built(cls, target, options))
        except StrategyFault as broken:
            fault = broken.detail
        except OURS:
            raise
        except BaseException as error:  # noqa: BLE001 - a strategy under test may raise anything; that is what is told
            at = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"raised {error!r} in {at.name}, {at.filename}:{at.lineno}"
        yield _CHECKS[name], fault


def _fault_of_options(shape: Any) -> str:
    if not (isinstance(shape, type) and issubclass(shape, msgspec.Struct)):
        return f"Options is {shape!r}; it must be a subclass of replaybuf.strategy.StrategyOptions"
    settings = shape.__struct_config__
    missing = [name for name in ("frozen", "forbid_unknown_fields") if not getattr(settings, name)]
    return f"Options lacks {' and '.join(missing)}=True" if missing else ""


def _built(cls: Any, name: str, options: dict[str, Any]) -> Any:
    """Build a strategy. Raises `Invalid`, also where its constructor raises or takes too long."""
    checked = check_options(name, options, cls.Options)
    return plugins.configured(name, lambda: cls(checked))


def _import(target: str) -> Any:
    if not plugins.is_object_path(target):
        raise Invalid(f"class is {target!r}; it must be MODULE:CLASS", name="class", value=target, bound="MODULE:CLASS")
    return plugins.load_object(target)


def _first_line(cls: Any) -> str:
    return (inspect.getdoc(cls) or "no docstring").partition("\n")[0]


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph and list item, for a terminal of any width; deeper indented ones stay."""
    return re.sub(r"(?<!\n)\n(?: {2})?(?![\n -])", " ", text)


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"


def _or_unbounded(bound: object) -> str:
    return "unbounded" if bound is None else str(bound)
