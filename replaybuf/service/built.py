"""The plug-ins of a configuration: checked when it is given, built for a run that exists."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from replaybuf.advantages import advantages
from replaybuf.config import RunConfig, StrategySpec, check_run_config
from replaybuf.errors import Invalid, StrategyFault
from replaybuf.plugins import build_filter, build_strategy, reported
from replaybuf.strategy import (
    Budget,
    BufferView,
    Evictions,
    Filter,
    Flow,
    Groups,
    Selection,
    Strategy,
    StrategyOptions,
    Waiting,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """The plug-ins of a configuration."""

    config: RunConfig
    strategy: Strategy[Any]
    filters: list[Filter[Any]]


class _Unavailable(Strategy[StrategyOptions], Filter[StrategyOptions]):
    """Stands for a plug-in that is not installed any more or does not import: it pauses the run that asks it."""

    def __init__(self, error: Invalid) -> None:
        super().__init__(StrategyOptions())
        self._detail = error.detail

    def _fault(self) -> StrategyFault:
        return StrategyFault(self._detail, name="strategy")

    def check(self, *asked: Any) -> None:
        """Raise."""
        raise self._fault()

    def admit(self, buffer: BufferView, flow: Flow) -> int:
        """Raise."""
        raise self._fault()

    def evict(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Raise."""
        raise self._fault()

    def drop(self, groups: Groups, buffer: BufferView) -> Evictions:
        """Raise."""
        raise self._fault()

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        """Raise."""
        raise self._fault()


def build(config: RunConfig) -> Built:
    """Build the plug-ins of a run that exists; those that cannot be built pause it when they are asked."""
    strategy: Strategy[Any]
    try:
        strategy = build_strategy(config.strategy.name, config.strategy.options)
    except Invalid as error:
        strategy = _Unavailable(error)
    filters: list[Filter[Any]] = []
    for spec in config.filters:
        try:
            filters.append(build_filter(spec.name, spec.options))
        except Invalid as error:
            filters.append(_Unavailable(error))
    return Built(config, strategy, filters)


def resolve_config(config: RunConfig) -> tuple[RunConfig, Strategy[Any]]:
    """Check a configuration and fill in the defaults of its plug-ins' options. Raises `Invalid`."""
    check_run_config(config)
    advantages(config.advantage, np.zeros(1))
    batch = config.batch
    budgets = {
        adapter: Budget(batch.tokens_per_batch, config.groups_per_batch_of(adapter), batch.seq_len)
        for adapter in config.policies
    }
    strategy = build_strategy(config.strategy.name, config.strategy.options)
    with reported(config.strategy.name):
        for adapter, budget in budgets.items():
            strategy.check(budget, config.steps_per_publish_of(adapter), config.limits.max_tokens_live)
    filters = [build_filter(spec.name, spec.options) for spec in config.filters]
    for spec, one in zip(config.filters, filters, strict=True):
        with reported(spec.name):
            for budget in budgets.values():
                one.check(budget, config.group_size)
    filled = msgspec.structs.replace(
        config,
        strategy=_filled_in(config.strategy, strategy),
        filters=[_filled_in(spec, one) for spec, one in zip(config.filters, filters, strict=True)],
    )
    return filled, strategy


def _filled_in(spec: StrategySpec, plugin: Strategy[Any] | Filter[Any]) -> StrategySpec:
    return msgspec.structs.replace(spec, options=msgspec.to_builtins(plugin.options))
