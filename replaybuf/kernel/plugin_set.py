"""The plug-ins of a configuration: checked when it is given, built for a run that exists."""

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
"""Of one token id, as frames hold them."""


Ask = Callable[[str, Callable[[], Strategy[Any]]], Strategy[Any]]
"""Ask a plug-in something; see `Selector.ask`."""


@dataclasses.dataclass(frozen=True, slots=True)
class PluginSet:
    """The plug-ins of a configuration, and what the strategy promises.

    `made` is the strategy, unless `fault` says why there is none: not installed any more, does not import, fails to
    observe. `heard`: the feedback that it observed, by step as msgpack; None where it observes none.
    """

    config: RunConfig
    bounds: Bounds
    made: Strategy[Any] | None
    filters: list[Filter[Any]]
    fault: str = ""
    heard: dict[int, bytes] | None = None

    @property
    def strategy(self) -> Strategy[Any]:
        """The strategy. Raises `StrategyFault` where any plug-in cannot be asked: the run pauses with it."""
        if self.made is None:
            raise StrategyFault(self.fault, name="strategy")
        return self.made


def build(config: RunConfig, feedback: dict[int, bytes], ask: Ask) -> PluginSet:
    """Build the plug-ins of a run that exists; one that cannot be built pauses it when they are asked.

    A strategy that observes is given all of the `feedback`, oldest first, in one question.
    """
    try:
        strategy, bounds = build_with_bounds(config.strategy.name, config.strategy.options)
        filters = [build_filter(spec.name, spec.options) for spec in config.filters]
    except Invalid as error:
        return PluginSet(config, Bounds(max_staleness=0, max_uses=1, look_ahead=0), None, [], error.detail)
    if type(strategy).observe is Strategy.observe:
        return PluginSet(config, bounds, strategy, filters)
    try:
        hearing = ask("observe", lambda: _hearing(config, feedback))
    except StrategyFault as fault:
        return PluginSet(config, bounds, None, filters, fault.detail, feedback)
    return PluginSet(config, bounds, hearing, filters, heard=feedback)


def _hearing(config: RunConfig, feedback: dict[int, bytes]) -> Strategy[Any]:
    """Build a strategy that knows this feedback and no other."""
    strategy = build_strategy(config.strategy.name, config.strategy.options)
    for step, told in feedback.items():
        strategy.observe(Feedback(step, msgspec.msgpack.decode(told)))
    return strategy


def resolve_config(config: RunConfig) -> tuple[RunConfig, Bounds]:
    """Check a configuration, fill in the defaults of its plug-ins' options, and read what its strategy promises.

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
    """Return the most tokens that may be live; of a bound in bytes, as many as it holds ids of tokens."""
    bounds = (limits.max_tokens_live, limits.max_bytes_live and limits.max_bytes_live // ID_BYTES)
    return min((bound for bound in bounds if bound is not None), default=None)
