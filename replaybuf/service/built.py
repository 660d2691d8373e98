"""The plug-ins of a configuration: checked when it is given, built for a run that exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from replaybuf.advantages import advantages
from replaybuf.config import Limits, RunConfig, StrategySpec, check_run_config
from replaybuf.errors import Invalid, StrategyFault
from replaybuf.plugins import Bounds, build_filter, build_strategy, build_with_bounds, configured
from replaybuf.strategy import (
    Budget,
    BufferView,
    Evictions,
    Feedback,
    Filter,
    Flow,
    Groups,
    Selection,
    Strategy,
    StrategyOptions,
    Waiting,
)

T = TypeVar("T")

ID_BYTES = 4
"""Of one token id, as frames hold them."""


class Ask(Protocol):
    """Ask a plug-in `what`; see `Selector.ask`."""

    def __call__(self, what: str, call: Callable[[], T], plugin: str | None = None) -> T:
        """Return the answer. Raises `StrategyFault`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """The plug-ins of a configuration, and what the strategy promises.

    `heard`: the feedback that the strategy observed, by step as msgpack; None where it observes none. `fault`: why it
    could not be built, or observe.
    """

    config: RunConfig
    strategy: Strategy[Any]
    bounds: Bounds
    filters: list[Filter[Any]]
    heard: dict[int, bytes] | None = None
    fault: StrategyFault | None = None

    def stands(self, config: RunConfig, feedback: dict[int, bytes]) -> bool:
        """Say whether these are the plug-ins of a run that has come to this configuration and feedback."""
        return self.config is config and (self.heard is None or self.heard is feedback)


class _Unavailable(Strategy[StrategyOptions], Filter[StrategyOptions]):
    """Stands for a plug-in that is not installed any more, does not import or fails to observe.

    It pauses the run that asks it.
    """

    def __init__(self, detail: str) -> None:
        super().__init__(StrategyOptions())
        self._detail = detail

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


def build(config: RunConfig, feedback: dict[int, bytes], ask: Ask) -> Built:
    """Build the plug-ins of a run that exists; those that cannot be built pause it when they are asked.

    A strategy that observes is given all of the `feedback`, oldest first, in one question to `ask`.
    """
    name = config.strategy.name
    filters: list[Filter[Any]] = []
    for spec in config.filters:
        try:
            filters.append(build_filter(spec.name, spec.options))
        except Invalid as error:
            filters.append(_Unavailable(error.detail))
    try:
        strategy, bounds = build_with_bounds(name, config.strategy.options)
    except Invalid as error:
        lacking = Bounds(max_staleness=0, max_uses=1, look_ahead=0)
        return Built(config, _Unavailable(error.detail), lacking, filters, fault=StrategyFault(error.detail, name=name))
    if type(strategy).observe is Strategy.observe:
        return Built(config, strategy, bounds, filters)
    try:
        hearing = ask("observe", lambda: _hearing(config, feedback))
    except StrategyFault as fault:
        return Built(config, _Unavailable(fault.detail), bounds, filters, feedback, fault)
    return Built(config, hearing, bounds, filters, feedback)


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
        for adapter in config.policies
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
