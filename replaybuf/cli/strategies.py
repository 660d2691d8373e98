"""The command `replaybuf strategies`: list, show and check strategies, filters and admission plug-ins."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replaybuf.cli.service import AsJson, print_json
from replaybuf.errors import Invalid, ReplaybufError, StrategyFault
from replaybuf.kernel.strategy.admission_plugin import Admission, AdmissionOptions
from replaybuf.kernel.strategy.contract import Filter, Strategy
from replaybuf.kernel.strategy.options import REQUIRED, StrategyOptions, check_options, describe_options
from replaybuf.kernel.strategy.plugin_set import bounds_of
from replaybuf.plugins import entry_points as plugins
from replaybuf.plugins.time_limit import PLUGIN_ERRORS

_KINDS = {"strategy": plugins.STRATEGIES, "filter": plugins.FILTERS, "admission": plugins.ADMISSIONS}


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """The class under test, and options to build it with."""

    target: str
    """Name of an installed strategy, filter or admission plug-in, or MODULE:CLASS. Modules in the current folder can be
    imported."""
    _: dataclasses.KW_ONLY
    option: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """KEY=VALUE: option of the plug-in. Repeat it for several options."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print JSON."""


def list_installed(*, as_json: AsJson = False) -> None:
    """List the installed strategies, filters and admission plug-ins with package and purpose.

    The exit code is 1 if one of them does not import.
    """
    console = Console()
    installed = {kind: [_describe(group, name) for name in plugins.names(group)] for kind, group in _KINDS.items()}
    if as_json:
        print_json(installed)
    for kind, rows in installed.items():
        if not rows or as_json:
            continue
        table = _table()
        for heading in (kind, "from", "what it does"):
            table.add_column(heading, header_style="dim", no_wrap=heading == kind, overflow="fold")
        for row in rows:
            purpose = Text(row["purpose"] or row["fault"] or "", style="red" if row["fault"] else "")
            table.add_row(row["name"], Text(row["from"] or ""), purpose)
        console.print(table)
        console.print()
    if any(row["fault"] for rows in installed.values() for row in rows):
        sys.exit(1)


def _describe(group: str, name: str) -> dict[str, str | None]:
    """Return name, package and purpose of a plug-in, or the fault of one that does not import."""
    purpose = fault = None
    try:
        purpose = _docstring(plugins.load(group, name)).partition("\n")[0]
    except ReplaybufError as error:
        fault = error.detail
    return {"name": name, "from": _origin(plugins.find(group, name)), "purpose": purpose, "fault": fault}


def show(
    name: Annotated[str, Parameter(help="Name of an installed plug-in; `replaybuf strategies list` lists them.")],
    /,
    *,
    as_json: AsJson = False,
) -> None:
    """Show purpose, bounds and options of a strategy, a filter or an admission plug-in."""
    group = _group_of(name)
    if group is None:
        installed = {kind: names for kind, of_kind in _KINDS.items() if (names := plugins.names(of_kind))}
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in installed.items())
        raise Invalid(f"name is {name!r}; installed: {listed}", name="name", value=name, bound=installed)
    console, entry, cls = Console(), plugins.find(group, name), plugins.load(group, name)
    options = describe_options(cls.Options)
    bounds: dict[str, Any] = {}
    if group == plugins.STRATEGIES and all(option.default != REQUIRED for option in options):
        bounds = bounds_of(name, _build(cls, name, {}))._asdict()
    if as_json:
        facts = {"name": name, "from": _origin(entry), "class": entry.value, "description": _docstring(cls)}
        print_json(facts | {"bounds": bounds, "options": [option._asdict() for option in options]})
        return
    console.print(Text(f"{name}  ({entry.value}, {_origin(entry)})", style="bold"), soft_wrap=True)
    console.print(Text(_unwrapped(_docstring(cls))))
    console.print()
    if bounds:
        listed = ", ".join(f"{what} {'unbounded' if bound is None else bound}" for what, bound in bounds.items())
        console.print(Text(f"by default: {listed}"))
    if not options:
        console.print("no options")
        return
    table = _table()
    for heading in ("option", "allowed values", "default", "meaning"):
        table.add_column(heading, header_style="dim", no_wrap=heading == "option", overflow="fold")
    for option in options:
        table.add_row(*(Text(cell) for cell in option))
    console.print(table)
    if cls.Options.__doc__ and cls.Options not in (StrategyOptions, AdmissionOptions):
        console.print(Text(_unwrapped(_docstring(cls.Options))))


def check(options: Annotated[CheckOptions, Parameter(name="*")]) -> None:
    """Test a strategy, a filter or an admission plug-in with the contract suite; needs the extra "testing".

    The exit code is 1 if it breaks a rule.
    """
    console, values = Console(), plugins.option_pairs(options.option)
    results: list[dict[str, str]] = []
    for what, fault in _findings(_load(options.target), options.target, values):
        results.append({"check": what, "fault": fault})
        if not options.json:
            mark = Text("fail" if fault else "ok", style="red" if fault else "green")
            console.print(Text.assemble(mark, f"  {what}", f": {fault}" if fault else ""), soft_wrap=True)
        if fault:  # later checks would report the same fault again
            break
    if options.json:
        print_json(results)
    if results[-1]["fault"]:
        sys.exit(1)


def _load(target: str) -> Any:
    """Import an installed name or MODULE:CLASS. Raises `Invalid`."""
    group = _group_of(target)
    if group is not None:
        return plugins.load(group, target)
    if not plugins.is_object_path(target):
        installed = [name for of_kind in _KINDS.values() for name in plugins.names(of_kind)]
        raise Invalid(
            f"class is {target!r}; it must be MODULE:CLASS or an installed name: {', '.join(installed)}",
            name="class",
            value=target,
            bound=["MODULE:CLASS", *installed],
        )
    return plugins.load_object(target)


def _findings(cls: Any, target: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each check and its fault; the fault is empty if the check passed."""
    is_kind = isinstance(cls, type) and issubclass(cls, (Strategy, Filter, Admission))
    yield (
        "is a strategy, a filter or an admission plug-in",
        ""
        if is_kind
        else f"{target} is not a subclass of replaybuf.strategy.Strategy, Filter or replaybuf.admission.Admission",
    )
    yield "has a docstring", "" if cls.__doc__ else "the class has no docstring"
    yield "has frozen options that reject unknown names", _options_fault(cls.Options)
    try:
        built = _build(cls, target, values)
    except ReplaybufError as error:
        yield "builds from its options", f"{error.detail}; set required options with --option KEY=VALUE"
        return
    yield "builds from its options", ""
    yield from _suite_findings(cls, built, target, values)


def _suite_findings(cls: Any, built: Any, target: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Run the contract suite. Raises `MissingExtra`."""
    from replaybuf import testing

    checks: list[tuple[str, Any]] = [("keeps the rules of a filter, over random groups", testing.check_filter)]
    if isinstance(built, Strategy):
        checks = [
            ("keeps the rules of a strategy, over random buffers", testing.check_strategy),
            ("makes progress and does not starve slow prompts, in a closed loop", testing.check_progress),
        ]
    elif isinstance(built, Admission):
        checks = [("keeps the rules of an admission plug-in, over hostile groups", testing.check_admission)]
    for what, run in checks:
        fault = ""
        try:
            run(lambda: _build(cls, target, values))
        except StrategyFault as broken:
            fault = broken.detail
        except PLUGIN_ERRORS as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"raised {error!r} in {at.name}, {at.filename}:{at.lineno}"
        yield what, fault


def _options_fault(shape: Any) -> str:
    if not (isinstance(shape, type) and issubclass(shape, msgspec.Struct)):
        return f"Options is {shape!r}; it must be a subclass of replaybuf.strategy.StrategyOptions"
    config = shape.__struct_config__
    missing = [name for name in ("frozen", "forbid_unknown_fields") if not getattr(config, name)]
    return f"Options lacks {' and '.join(missing)}=True" if missing else ""


def _build(cls: Any, name: str, values: dict[str, Any]) -> Any:
    """Build a strategy. Raises `Invalid` also if its constructor raises or takes too long."""
    checked = check_options(name, values, cls.Options)
    return plugins.configured(name, lambda: cls(checked))


def _group_of(name: str) -> str | None:
    """Return the entry-point group of an installed name."""
    return next((group for group in _KINDS.values() if name in plugins.names(group)), None)


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _docstring(cls: Any) -> str:
    return inspect.getdoc(cls) or "no docstring"


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph and list item, so that they wrap at the width of the terminal."""
    return re.sub(r"(?<!\n)\n(?: {2})?(?![\n -])", " ", text)


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"
