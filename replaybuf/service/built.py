"""The plug-ins of a configuration: checked when it is given, built for a run that exists."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from replaybuf.advantages import advantages
from replaybuf.config import RunConfig, check_run_config
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
    strategy = build_strategy(config.strategy.name, config.strategy.options)
    batch = config.batch
    with reported(config.strategy.name):
        for adapter in config.policies:
            budget = Budget(batch.tokens_per_batch, config.groups_per_batch_of(adapter), batch.seq_len)
            strategy.check(budget, config.steps_per_publish_of(adapter), config.limits.max_tokens_live)
    spec = msgspec.structs.replace(config.strategy, options=msgspec.to_builtins(strategy.options))
    filters = [
        msgspec.structs.replace(one, options=msgspec.to_builtins(build_filter(one.name, one.options).options))
        for one in config.filters
    ]
    return msgspec.structs.replace(config, strategy=spec, filters=filters), strategy
