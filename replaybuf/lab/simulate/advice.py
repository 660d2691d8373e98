"""Advice for a run: strategy, staleness, slots and share of the engines, by a small grid of simulations.

::

    present workload ─► first strategy at each share of engines ─► all others at the best share and beside it
                                                                                        │
                        each choice changed alone: its cost ◄─ proposal ◄─ its slots ◄─ the best one

The simulator knows time, staleness and waste. It does not know what a step teaches, so it proposes no reuse: `replay`
is listed with its uses per group, for `replaybuf study` to judge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from cyclopts.validators import Number

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.plugin_set import resolve_config
from replaybuf.lab.simulate.figures import Figures
from replaybuf.lab.simulate.workload import DEFAULT_GROUP_SIZE, Supply, Workload
from replaybuf.wire.config import RunConfig, StrategySpec

SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
SLOT_FACTORS = (0.5, 2.0)
TIE = 0.03
"""Figures this close count as equal: a real service and the simulator agree within 3 % of the time in the tests."""
NOTE = (
    "How sure: in 45 pairs of a recording and a real run with stand-in producers, steps per hour were within 8 %, and "
    "waits within 6 % of the time. A recording of few groups knows less. Trust an order with gaps above 10 %, and "
    "measure closer ones."
)
CANDIDATES = (
    StrategySpec(name="one-step-off-policy", options={"max_staleness": 1}),
    StrategySpec(name="on-policy"),
    StrategySpec(name="one-step-off-policy", options={"max_staleness": 2}),
    StrategySpec(name="one-step-off-policy", options={"max_staleness": 4}),
    StrategySpec(name="replay", options={"max_uses": 2, "max_staleness": 4}),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The machines of the run, for --advise."""

    gpus: PositiveInt | None = None
    """GPUs of trainer and engines together."""
    generating: Annotated[float, Parameter(validator=Number(gt=0, lt=1))] = 0.75
    """Share of the GPUs that generate now; --train-s and the recording are of this share."""
    tokens_per_s: PositiveFloat | None = None
    """Tokens/s that a generating GPU samples at full load. Default: as recorded, else 2000."""
    stream_tokens_per_s: PositiveFloat = 60.0
    """Tokens/s of one completion on an engine with few others: fewer slots make none faster than this."""


class Choice(msgspec.Struct, frozen=True):
    """One point of the grid: `generating` share of the GPUs, `slots` of all engines, and what was simulated there."""

    strategy: str
    options: dict[str, Any]
    generating: float
    slots: int
    steps_per_hour: float
    wait_share: float
    wait_reason: str | None
    staleness_mean: float
    waste_share: float
    uses_mean: float
    idle_share: float

    @property
    def title(self) -> str:
        """Name of the strategy with its options."""
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return f"{self.strategy} ({options})" if options else self.strategy

    @property
    def reuses(self) -> bool:
        """Whether a group is trained more than once, so that a step has fewer new groups."""
        return self.uses_mean > 1 + TIE


class Cost(msgspec.Struct, frozen=True):
    """What another choice would change: `what` it is, and its steps per hour over those of the proposal, minus 1."""

    what: str
    choice: Choice
    steps_change: float


class Advice(msgspec.Struct, frozen=True):
    """The proposal, what the other choices cost, and how sure the simulator is of it."""

    proposal: Choice
    costs: list[Cost]
    sure: str


Simulate = Callable[[RunConfig, Workload], Figures]


def advise(
    base: Workload, config: RunConfig, fleet: FleetOptions, specs: Sequence[StrategySpec], run: Simulate
) -> Advice:
    """Simulate a small grid, and choose. `base`: workload with `fleet.generating` of the GPUs; `run` simulates one.

    Raises `Invalid` if every strategy reuses groups, because their steps cannot be compared with fresh ones.
    """

    def at(spec: StrategySpec, share: float, factor: float = 1.0) -> Choice:
        changed = msgspec.structs.replace(config, strategy=spec, max_steps=None)
        workload = scaled(base, fleet, share, factor, window_of(changed))
        figures = run(changed, workload)
        return _choice(spec, figures, share, workload.slots)

    shares = shares_of(fleet)
    rows = [[at(specs[0], share) for share in shares]]
    middle = best(rows[0])
    near = shares[max(0, middle - 1) : middle + 2]
    rows += [[at(spec, share) for share in near] for spec in specs[1:]]
    bests = [row[best(row)] for row in rows]
    fresh = [place for place, choice in enumerate(bests) if not choice.reuses]
    if not fresh:
        detail = "every --strategy trains groups more than once; give one that uses each once, or none for the usual"
        raise Invalid(detail, name="strategy", value=[spec.name for spec in specs])
    place = fresh[best(bests[number] for number in fresh)]
    chosen = bests[place]
    others = (at(specs[place], chosen.generating, factor) for factor in SLOT_FACTORS)
    by_slots = [chosen, *(choice for choice in others if choice.slots != chosen.slots)]
    proposal = by_slots[best(by_slots)]
    costly = [(f"strategy {choice.title}", choice) for number, choice in enumerate(bests) if number != place]
    costly += [(f"slots {choice.slots:,}", choice) for choice in by_slots if choice is not proposal]
    costly += [(f"engines {plan.generating:.0%} of the GPUs", plan) for plan in rows[place] if plan is not chosen]
    costs = [Cost(what, plan, plan.steps_per_hour / (proposal.steps_per_hour or 1.0) - 1) for what, plan in costly]
    return Advice(proposal, costs, _sure(costs))


def best(choices: Iterable[Choice]) -> int:
    """Return the position of the best choice: most steps per hour; of those within `TIE`, the least stale.

    Then least waste, then fewest slots.
    """
    listed = list(choices)
    most = max(choice.steps_per_hour for choice in listed)
    near = [place for place, choice in enumerate(listed) if choice.steps_per_hour >= most * (1 - TIE)]

    def rank(place: int) -> tuple[float, float, int, float]:
        choice = listed[place]
        return round(choice.staleness_mean, 1), round(choice.waste_share, 2), choice.slots, -choice.steps_per_hour

    return min(near, key=rank)


def most_simulations(fleet: FleetOptions, specs: Sequence[StrategySpec]) -> int:
    """Return the maximum number of simulations of the grid."""
    return len(shares_of(fleet)) + 3 * (len(specs) - 1) + len(SLOT_FACTORS)


def shares_of(fleet: FleetOptions) -> list[float]:
    """Return the shares to try, rounded to whole GPUs: at least one generates and one trains."""
    wanted = {*SHARES, fleet.generating}
    if fleet.gpus is None:
        return sorted(wanted)
    gpus = fleet.gpus
    if gpus < 2:
        raise Invalid(f"gpus is {gpus}; --advise needs at least 2: one trains, one generates", name="gpus", value=gpus)
    return sorted({min(gpus - 1, max(1, round(share * gpus))) / gpus for share in wanted})


def scaled(
    base: Workload, fleet: FleetOptions, share: float, factor: float = 1.0, window: int | None = None
) -> Workload:
    """Return the workload with another share of engines, and `factor` times the slots per engine.

    Slots follow the engines, and a step takes longer on fewer GPUs. An engine has a fixed speed in all: with more slots
    each completion is slower, with fewer it is faster, up to `stream_tokens_per_s`. `window`: groups that the strategy
    admits; more slots would stay empty.
    """
    present = base.slots * share / fleet.generating
    slots = max(1, round(present * factor) if window is None else min(round(present * factor), window))
    faster = (1 - fleet.generating) / (1 - share)
    fastest_s = min(base.token_s, 1 / fleet.stream_tokens_per_s)
    return dataclasses.replace(
        base,
        slots=slots,
        token_s=max(base.token_s * slots / present, fastest_s),
        train_s=base.train_s * faster,
        train_token_s=base.train_token_s * faster,
    )


def window_of(config: RunConfig) -> int | None:
    """Return how many groups the strategy of a run admits at the same time; None = it depends on their tokens."""
    bounds, groups = resolve_config(config)[1], config.batch.groups_per_batch
    if bounds.max_staleness is None or groups is None:
        return None
    places = (bounds.max_staleness + 1) * groups * config.steps_per_publish
    return max(1, places // (bounds.max_uses or 1))


def from_numbers(workload: Workload, config: RunConfig, fleet: FleetOptions, tokens_per_s: float) -> Workload:
    """Return the workload whose engines sample `tokens_per_s` per GPU when all slots are busy.

    A slot is busy until the longest completion of its group ends, so fewer completions run than there is room for.
    """
    generating = max(1, round((fleet.gpus or 1) * fleet.generating))
    unit = dataclasses.replace(workload, group_s=0.0, token_s=1.0, timeout_s=None, failure_rate=0.0, lost_rate=0.0)
    supply = Supply(unit, config, 0)
    longest = supply.duration_s
    completions = supply.tokens_per_group - (config.group_size or DEFAULT_GROUP_SIZE) * workload.prompt_tokens
    group_s = workload.slots * completions / (generating * tokens_per_s)
    token_s = max((group_s - workload.group_s) / longest, 1 / fleet.stream_tokens_per_s)
    return dataclasses.replace(workload, token_s=float(np.round(token_s, 6)))


def _choice(spec: StrategySpec, figures: Figures, share: float, slots: int) -> Choice:
    reasons = figures.wait_by_reason
    return Choice(
        strategy=spec.name,
        options=spec.options,
        generating=share,
        slots=slots,
        steps_per_hour=figures.steps_per_hour,
        wait_share=figures.wait_share,
        wait_reason=max(reasons, key=reasons.__getitem__, default=None),
        staleness_mean=figures.staleness_mean,
        waste_share=figures.waste_share,
        uses_mean=figures.uses_mean,
        idle_share=figures.idle_share,
    )


def _sure(costs: Sequence[Cost]) -> str:
    """Say which strategies are as fast as the proposal within the error of the simulator."""
    near = [cost.what for cost in costs if not cost.choice.reuses and abs(cost.steps_change) <= TIE]
    if not near:
        return f"No other choice is within {TIE:.0%}. {NOTE}"
    return f"Within {TIE:.0%} of the proposal, so equal here, but staler or with more waste: {', '.join(near)}. {NOTE}"
