"""Plug-ins of a run configuration: checked when a run is configured, built for an existing run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from replaybuf.errors import Invalid, StrategyFault
from replaybuf.kernel.advantages import advantages
from replaybuf.kernel.plugins import Bounds, build_filter, build_strategy, build_with_bounds, configured
from replaybuf.kernel.strategy import Budget, Feedback, Filter, Strategy
from replaybuf.wire.config import Limits, RunConfig, StrategySpec, check_run_config

ID_BYTES = 4
"""Bytes of one token id in a frame."""


Ask = Callable[[str, Callable[[], Strategy[Any]]], Strategy[Any]]
"""Call a plug-in, see `Selector.ask`."""


@dataclasses.dataclass(frozen=True, slots=True)
class PluginSet:
    """Plug-ins of a configuration, and the bounds of its strategy.

    `fault`: why a plug-in cannot be called (not installed any more, import or `observe` fails).
    `observed`: feedback that the strategy observed, by step as msgpack; None if it observes none.
    """

    config: RunConfig
    bounds: Bounds
    filters: list[Filter[Any]]
    _strategy: Strategy[Any] | None
    fault: str = ""
    observed: dict[int, bytes] | None = None

    @property
    def strategy(self) -> Strategy[Any]:
        """The strategy. Raises `StrategyFault` if a plug-in cannot be called, which pauses the run."""
        if self._strategy is None:
            raise StrategyFault(self.fault, name="strategy")
        return self._strategy


def build_plugins(config: RunConfig, feedback: dict[int, bytes], ask: Ask) -> PluginSet:
    """Build the plug-ins of an existing run; one that fails is reported when it is called.

    A strategy that observes gets all of the `feedback` in one call, oldest first.
    """
    name, options = config.strategy.name, config.strategy.options
    try:
        strategy, bounds = build_with_bounds(name, options)
        filters = [build_filter(spec.name, spec.options) for spec in config.filters]
    except Invalid as error:
        return PluginSet(config, Bounds(max_staleness=0, max_uses=1, look_ahead=0), [], None, error.detail)
    if type(strategy).observe is Strategy.observe:
        return PluginSet(config, bounds, filters, strategy)

    def observing() -> Strategy[Any]:
        """Build the strategy anew: `ask` may repeat the call, and feedback observed twice would count twice."""
        built = build_strategy(name, options)
        for step, values in feedback.items():
            built.observe(Feedback(step, msgspec.msgpack.decode(values)))
        return built

    try:
        return PluginSet(config, bounds, filters, ask("observe", observing), observed=feedback)
    except StrategyFault as fault:
        return PluginSet(config, bounds, filters, None, fault.detail, feedback)


def resolve_config(config: RunConfig) -> tuple[RunConfig, Bounds]:
    """Check a configuration, fill in the defaults of its plug-ins' options, and read the strategy's bounds.

    Raises `Invalid`.
    """
    check_run_config(config)
    advantages(config.advantage, np.zeros(1))
    batch, live_tokens = config.batch, _live_tokens(config.limits)
    budgets = {
        adapter: Budget(batch.tokens_per_batch, config.groups_per_batch_of(adapter), batch.seq_len)
        for adapter in config.adapter_names
    }
    name = config.strategy.name
    strategy, bounds = build_with_bounds(name, config.strategy.options)
    for adapter, budget in budgets.items():
        run = (budget, config.steps_per_publish_of(adapter), live_tokens)
        configured(name, lambda run=run: strategy.check(*run))  # type: ignore[misc]
    filters = [build_filter(spec.name, spec.options) for spec in config.filters]
    for spec, one in zip(config.filters, filters, strict=True):
        for budget in budgets.values():
            configured(spec.name, lambda one=one, budget=budget: one.check(budget, config.group_size))  # type: ignore[misc]
    filled = msgspec.structs.replace(
        config,
        strategy=_filled_in(config.strategy, strategy),
        filters=[_filled_in(spec, one) for spec, one in zip(config.filters, filters, strict=True)],
    )
    return filled, bounds


def _filled_in(spec: StrategySpec, plugin: Strategy[Any] | Filter[Any]) -> StrategySpec:
    return msgspec.structs.replace(spec, options=configured(spec.name, lambda: msgspec.to_builtins(plugin.options)))


def _live_tokens(limits: Limits) -> int | None:
    """Return the most tokens that may be live; a bound in bytes counts as that many token ids."""
    bounds = (limits.max_tokens_live, limits.max_bytes_live and limits.max_bytes_live // ID_BYTES)
    return min((bound for bound in bounds if bound is not None), default=None)
