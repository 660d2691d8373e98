"""Plug-ins of a run configuration: checked when a run is configured, built for an existing run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from replaybuf.errors import Invalid, StrategyFault
from replaybuf.kernel.strategy.admission_plugin import Admission
from replaybuf.kernel.strategy.advantages import advantages
from replaybuf.kernel.strategy.contract import Budget, Feedback, Filter, Strategy
from replaybuf.kernel.strategy.options import check_options
from replaybuf.plugins.entry_points import ADMISSIONS, FILTERS, STRATEGIES, configured, load
from replaybuf.plugins.time_limit import (
    IMPORT_LIMIT_S,
    TookTooLong,
    call_limited,
)
from replaybuf.wire.column.columns import OPTIONAL
from replaybuf.wire.config import AdmissionSpec, Limits, RunConfig, StrategySpec
from replaybuf.wire.config_check import check_run_config
from replaybuf.wire.late_columns import FIXED_NAMES, MOST_PARTS, check_name
from replaybuf.wire.names import REASON_WORD

ID_BYTES = 4
"""Bytes of one token id in a frame."""


Ask = Callable[[str, Callable[[], Strategy[Any]]], Strategy[Any]]
"""Call a plug-in, see `Selector.ask`."""


T = TypeVar("T")


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
    strategy: Strategy[Any] = _build(STRATEGIES, name, options, Strategy)
    return strategy, bounds_of(name, strategy)


def bounds_of(name: str, strategy: Strategy[Any]) -> Bounds:
    """Read the bounds of a strategy. Raises `Invalid` for an invalid one."""
    bounds = configured(name, lambda: Bounds(strategy.max_staleness, strategy.max_uses, strategy.look_ahead))
    for what, value, least, unbounded in zip(Bounds._fields, bounds, (0, 1, 0), (True, True, False), strict=True):
        if not ((type(value) is int and value >= least) or (unbounded and value is None)):
            raise Invalid(
                f"{what} of strategy {name!r} is {value!r}; it must be a whole number >= {least}"
                + (" or None" if unbounded else ""),
                name=f"strategy.{what}",
                value=repr(value),
                bound=least,
            )
    return bounds


def required_columns(name: str, plugin: Strategy[Any] | Filter[Any]) -> tuple[str, ...]:
    """Return the columns that a plug-in and its options require. Raises `Invalid` for a name that no column has.

    Options of a plug-in need not be `StrategyOptions`, which have `requires`.
    """
    declared = configured(name, lambda: plugin.requires)
    if not isinstance(declared, tuple | list) or not all(isinstance(each, str) for each in declared):
        detail = f"requires of {name!r} is {declared!r}; it must be a tuple of names of columns"
        raise Invalid(detail, name="requires", value=name)
    columns = dict.fromkeys((*declared, *(getattr(plugin.options, "requires", None) or ())))
    for column in columns:
        check_name(column)
    return tuple(columns)


def build_filter(name: str, options: dict[str, Any]) -> Filter[Any]:
    """Build a filter from its name and options. Raises `Invalid`, as `build_with_bounds`."""
    built: Filter[Any] = _build(FILTERS, name, options, Filter)
    return built


def resolve_admission(spec: AdmissionSpec) -> AdmissionSpec:
    """Check an admission plug-in, without building it, and fill in the defaults of its options. Raises `Invalid`."""
    name, cls = spec.name, _load(ADMISSIONS, spec.name, Admission)

    def checked() -> Any:
        for what, words, allowed in (
            ("reasons", cls.reasons, lambda word: bool(REASON_WORD.fullmatch(word))),
            ("requires", cls.requires, OPTIONAL.__contains__),
        ):
            wrong = [word for word in words if not (isinstance(word, str) and allowed(word))]
            if not isinstance(words, tuple) or wrong:
                bound = REASON_WORD.pattern if what == "reasons" else sorted(OPTIONAL)
                detail = f"{what} of admission {name!r} is {words!r}; it must be a tuple of names such as {bound}"
                raise Invalid(detail, name=f"admission.{what}", value=repr(words), bound=bound)
        return msgspec.to_builtins(check_options(name, spec.options, cls.Options, kind="admission"))

    return msgspec.structs.replace(spec, options=configured(name, checked))


def _build(group: str, name: str, options: dict[str, Any], base: type[Strategy[Any]] | type[Filter[Any]]) -> Any:
    cls, kind = _load(group, name, base), base.__name__.lower()

    def built() -> Any:
        checked = check_options(name, options, cls.Options, kind=kind)
        plugin = cls(checked)
        if not hasattr(plugin, "options"):  # its `__init__` reads them and does not call ours
            plugin.options = checked
        return plugin

    return configured(name, built)


def _load(group: str, name: str, base: type[Any]) -> Any:
    """Import a plug-in that must be a subclass of `base`. Raises `Invalid`."""
    kind = base.__name__.lower()
    try:  # once: modules loaded before the interruption would not be imported again
        cls = call_limited(lambda: load(group, name), IMPORT_LIMIT_S)
    except TookTooLong as error:
        raise Invalid(f"import of {kind} {name!r} {error}", name=name, bound=IMPORT_LIMIT_S) from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise Invalid(f"{kind} {name!r} is {cls!r}; it must be a subclass of {base.__name__}", name=kind, value=name)
    return cls


@dataclasses.dataclass(frozen=True, slots=True)
class PluginSet:
    """Plug-ins of a configuration, and the bounds of its strategy.

    `required`: columns that the strategy requires, then those of each filter.
    `fault`: why a plug-in cannot be called (not installed any more, import or `observe` fails).
    `observed`: feedback that the strategy observed, by step as msgpack; None if it observes none. `sources`: hashes of
    sources whose live groups the strategy wants to know.
    """

    config: RunConfig
    bounds: Bounds
    filters: list[Filter[Any]]
    _strategy: Strategy[Any] | None
    fault: str = ""
    observed: dict[int, bytes] | None = None
    required: tuple[tuple[str, ...], ...] = ((),)
    sources: tuple[int, ...] = ()

    @property
    def all_required(self) -> tuple[str, ...]:
        """Columns that a group needs to be usable."""
        return tuple(dict.fromkeys(name for names in self.required for name in names))

    @property
    def strategy(self) -> Strategy[Any]:
        """The strategy. Raises `StrategyFault` if a plug-in cannot be called, which pauses the run."""
        if self._strategy is None:
            raise StrategyFault(self.fault, name="strategy")
        return self._strategy

    @property
    def evicts(self) -> bool:
        """Whether the strategy has an `evict` of its own. Raises `StrategyFault`."""
        return type(self.strategy).evict is not Strategy.evict


def build_plugins(config: RunConfig, feedback: dict[int, bytes], ask: Ask) -> PluginSet:
    """Build the plug-ins of an existing run; one that fails is reported when it is called.

    A strategy that observes gets all of the `feedback` in one call, oldest first.
    """
    name, options = config.strategy.name, config.strategy.options
    try:
        strategy, bounds = build_with_bounds(name, options)
        filters = [build_filter(spec.name, spec.options) for spec in config.filters]
        required = _required(config, strategy, filters)
        sources = configured(name, lambda: tuple(map(int, strategy.sources)))
    except Invalid as error:
        return PluginSet(config, Bounds(max_staleness=0, max_uses=1, look_ahead=0), [], None, error.detail)
    plugins = PluginSet(config, bounds, filters, strategy, required=required, sources=sources)
    if type(strategy).observe is Strategy.observe:
        return plugins

    def observing() -> Strategy[Any]:
        """Build the strategy anew: `ask` may repeat the call, and feedback observed twice would count twice."""
        built = build_strategy(name, options)
        for step, values in feedback.items():
            built.observe(Feedback(step, msgspec.msgpack.decode(values)))
        return built

    try:
        return dataclasses.replace(plugins, _strategy=ask("observe", observing), observed=feedback)
    except StrategyFault as fault:
        return dataclasses.replace(plugins, _strategy=None, fault=fault.detail, observed=feedback)


def _required(
    config: RunConfig, strategy: Strategy[Any], filters: Sequence[Filter[Any]]
) -> tuple[tuple[str, ...], ...]:
    """Return the required columns of the strategy, then of each filter. Raises `Invalid`, also for too many of them."""
    named = zip(config.filters, filters, strict=True)
    required = (
        required_columns(config.strategy.name, strategy),
        *(required_columns(f.name, filter_) for f, filter_ in named),
    )
    parts = {name for names in required for name in names if name not in FIXED_NAMES}
    if len(parts) > MOST_PARTS:
        detail = f"requires names {len(parts)} reward parts; the maximum is {MOST_PARTS}"
        raise Invalid(detail, name="requires", value=sorted(parts), bound=MOST_PARTS)
    return required


def resolve_config(config: RunConfig, ranks: int = 1) -> tuple[RunConfig, Bounds]:
    """Check a configuration, fill in the defaults of its plug-ins' options, and read the strategy's bounds.

    `ranks`: of the attached trainer, for a token budget that follows it. Raises `Invalid`.
    """
    check_run_config(config, ranks)
    advantages(config.advantage, np.zeros(1))
    batch, live_tokens = config.batch, _live_tokens(config.limits)
    budgets = {
        adapter: Budget(batch.token_budget(ranks), config.groups_per_batch_of(adapter), batch.seq_len)
        for adapter in config.adapter_names
    }
    name = config.strategy.name
    strategy, bounds = build_with_bounds(name, config.strategy.options)
    for adapter, budget in budgets.items():
        run = (budget, config.steps_per_publish_of(adapter), live_tokens)
        configured(name, lambda run=run: strategy.check(*run))  # type: ignore[misc]
    filters = [build_filter(spec.name, spec.options) for spec in config.filters]
    for spec, filter_ in zip(config.filters, filters, strict=True):
        for budget in budgets.values():
            configured(spec.name, lambda filter_=filter_, budget=budget: filter_.check(budget, config.group_size))  # type: ignore[misc]
    _required(config, strategy, filters)
    filled = msgspec.structs.replace(
        config,
        strategy=_filled_in(config.strategy, strategy),
        filters=[_filled_in(spec, filter_) for spec, filter_ in zip(config.filters, filters, strict=True)],
        admissions=list(map(resolve_admission, config.admissions)),
    )
    return filled, bounds


def _filled_in(spec: StrategySpec, plugin: Strategy[Any] | Filter[Any]) -> StrategySpec:
    return msgspec.structs.replace(spec, options=configured(spec.name, lambda: msgspec.to_builtins(plugin.options)))


def _live_tokens(limits: Limits) -> int | None:
    """Return the most tokens that may be live; a bound in bytes counts as that many token ids."""
    bounds = (limits.max_tokens_live, limits.max_bytes_live and limits.max_bytes_live // ID_BYTES)
    return min((bound for bound in bounds if bound is not None), default=None)
