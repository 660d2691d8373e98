"""Measurements of a simulation: a meter that adds up, and the figures of one strategy at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.kernel.strategy.options import StrategyOptions
from replaybuf.packing.cost import rollout_costs
from replaybuf.packing.pack import pack, padding_fraction
from replaybuf.wire.answer.run_status import Coverage
from replaybuf.wire.ledger import BatchRecord

SERIES_POINTS = 400
"""Maximum number of points of a curve over time."""
BINS = np.logspace(0, np.log10(2**24), 97)
"""Edges of the length histograms, in tokens."""
_QUANTILES = (50, 90, 99)


class Lengths(msgspec.Struct, frozen=True):
    """Mean tokens per rollout, one value per group: number of groups, mean, quantiles, groups per bin of `BINS`."""

    groups: int
    mean: float
    p50: float
    p90: float
    p99: float
    bins: list[int]


class Waste(msgspec.Struct, frozen=True):
    """Groups that no batch used, and their tokens."""

    groups: int
    tokens: int


class Series(msgspec.Struct, frozen=True):
    """Curves over time, of equal length: seconds; live groups and tokens; tickets out."""

    t_s: list[float]
    groups: list[int]
    tokens: list[int]
    tickets_out: list[int]


class Packing(msgspec.Struct, frozen=True):
    """Means over a sample of packed batches: unused share of the rows, cost of the costliest rank over the mean."""

    batches: int
    unused_share: float
    imbalance: float


class Figures(msgspec.Struct, frozen=True):
    """One simulated run.

    - `options`: all of them; `changed_options`: those that differ from their defaults
    - `ended`: `steps` after all steps, `finished` without further prompts, else the reason of the last wait
    - `seconds`: virtual; `train_share`, `publish_share`, `wait_share`, `wait_by_reason`: shares of them
    - `idle_share`: of the producers' slots; `staleness`: uses by staleness; `uses`: groups by number of uses
    - `tokens_live_max`: maximum of live tokens; `held_groups`: groups for which there was no room at first
    - `waste`: by reason, of `generated_groups` and `generated_tokens`; `waste_share`: of these tokens
    """

    strategy: str
    options: dict[str, Any]
    changed_options: dict[str, Any]
    ended: str
    steps: int
    seconds: float
    train_share: float
    publish_share: float
    wait_share: float
    wait_by_reason: dict[str, float]
    idle_share: float
    generated_groups: int
    generated_tokens: int
    stored_groups: int
    used_tokens: int
    staleness: dict[int, int]
    staleness_mean: float
    uses: dict[int, int]
    waste: dict[str, Waste]
    waste_share: float
    live_mean: float
    live_max: int
    tokens_live_max: int
    held_groups: int
    buffer: Series
    generated_lengths: Lengths
    used_lengths: Lengths
    dropped_lengths: Lengths
    coverage: Coverage
    packing: Packing

    @property
    def steps_per_hour(self) -> float:
        """Steps per virtual hour."""
        return self.steps * 3600 / self.seconds if self.seconds else 0.0

    @property
    def length_bias(self) -> float:
        """Mean length of used groups over that of generated ones; below 1, long groups were lost."""
        return self.used_lengths.mean / self.generated_lengths.mean if self.generated_lengths.mean else 1.0

    @property
    def uses_mean(self) -> float:
        """Mean uses of the used groups."""
        used = sum(self.uses.values())
        return sum(times * groups for times, groups in self.uses.items()) / used if used else 0.0


class Meter:
    """Adds up events. Times in virtual seconds, tokens of whole groups; `held`: prompt indexes."""

    def __init__(self) -> None:
        self.train_s = 0.0
        self.publish_s = 0.0
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.idle_slot_s = 0.0
        self.generated_groups = 0
        self.generated_tokens = 0
        self.used_tokens = 0
        self.tokens_live_max = 0
        self.held: set[int] = set()
        self.wasted: defaultdict[str, list[int]] = defaultdict(list)
        self._generated: list[float] = []
        self._used: list[float] = []
        self._dropped: list[float] = []
        self._points: list[tuple[float, int, int, int]] = []
        self._packed: list[tuple[float, float]] = []

    def generated(self, tokens: int, rollouts: int) -> None:
        """Count a generated group, used or not."""
        self.generated_groups += 1
        self.generated_tokens += tokens
        self._generated.append(tokens / rollouts)

    def wasted_group(self, reason: str, tokens: int, rollouts: int) -> None:
        """Count a group that no batch will use."""
        self.wasted[reason].append(tokens)
        self._dropped.append(tokens / rollouts)

    def batch(self, record: BatchRecord, rollouts_per_group: int) -> None:
        """Count a batch."""
        self.used_tokens += record.tokens
        for group in record.groups:
            if group.times_sampled == 1:
                self._used.append(group.tokens / rollouts_per_group)

    def pack(self, lengths: npt.NDArray[np.int32], seq_len: int, ranks: int) -> None:
        """Pack the rollouts of a batch for the trainer's ranks, as the service does, and record the result."""
        grid, costs = pack(lengths, seq_len, ranks), rollout_costs(lengths).tolist()
        loads = np.array([sum(costs[item] for row in rank for item in row) for rank in grid])
        self._packed.append((padding_fraction(lengths, grid, seq_len), float(loads.max() / loads.mean())))

    def buffer(self, now_s: float, groups: int, tokens: int, tickets_out: int) -> None:
        """Record what the buffer holds now."""
        self._points.append((now_s, groups, tokens, tickets_out))

    def lengths(self) -> tuple[Lengths, Lengths, Lengths]:
        """Summarise the lengths of generated, used and dropped groups."""
        return _lengths(self._generated), _lengths(self._used), _lengths(self._dropped)

    def packing(self) -> Packing:
        """Average over the packed batches."""
        if not self._packed:
            return Packing(0, 0.0, 0.0)
        unused, imbalance = np.mean(self._packed, axis=0).tolist()
        return Packing(len(self._packed), unused, imbalance)

    def series(self) -> Series:
        """Return at most `SERIES_POINTS` points of the curves."""
        every = max(1, -(-len(self._points) // SERIES_POINTS))
        columns = list(zip(*self._points[::every], strict=True)) or [(), (), (), ()]
        return Series(*(list(column) for column in columns))

    def live(self) -> tuple[float, int]:
        """Return mean and maximum of the live groups over the recorded points."""
        live = [point[1] for point in self._points]
        return (float(np.mean(live)), max(live)) if live else (0.0, 0)

    def waste(self) -> dict[str, Waste]:
        """Return the waste by reason."""
        return {reason: Waste(len(tokens), sum(tokens)) for reason, tokens in sorted(self.wasted.items())}


def _lengths(values: Sequence[float]) -> Lengths:
    if not values:
        return Lengths(0, 0.0, 0.0, 0.0, 0.0, [0] * (len(BINS) - 1))
    array: npt.NDArray[np.float64] = np.asarray(values, np.float64)
    p50, p90, p99 = np.percentile(array, _QUANTILES).tolist()
    return Lengths(len(array), float(array.mean()), p50, p90, p99, np.histogram(array, BINS)[0].tolist())


def changed_options(options: StrategyOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    fields = msgspec.structs.fields(options)
    defaults = {f.name: f.default if f.default_factory is msgspec.NODEFAULT else f.default_factory() for f in fields}
    return {name: value for name, default in defaults.items() if (value := getattr(options, name)) != default}
