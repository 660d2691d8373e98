"""Comparison of strategies: accuracy by cost, with confidence bands over seeds. Pure functions.

Every training gives points (cost, accuracy), the first at cost 0. Between two points the accuracy is interpolated, so
that seeds with other costs can be averaged at the same cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Points: TypeAlias = Sequence[tuple[float, float]]
"""Cost and accuracy of one training, by rising cost."""

T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Quantile 0.975 of Student's t by degrees of freedom, from 1 on: 16 seeds have 15."""
CURVE_POINTS = 21
LEVELS = 20
"""Accuracies at which costs are compared."""


class Interval(msgspec.Struct, frozen=True):
    """A mean over `seeds`, and half the width of its 95 % confidence interval; None for one seed."""

    mean: float
    half: float | None
    seeds: int


class Band(msgspec.Struct, frozen=True):
    """A curve: `low` and `high` bound the 95 % confidence interval of the mean at each cost; None for one seed."""

    cost: list[float]
    mean: list[float]
    low: list[float | None]
    high: list[float | None]


def interval(values: Sequence[float]) -> Interval:
    """Return mean and 95 % confidence interval of at least one value, by Student's t."""
    array = np.asarray(values, np.float64)
    seeds = len(array)
    half = None if seeds < 2 else float(T95[min(seeds - 2, len(T95) - 1)] * array.std(ddof=1) / seeds**0.5)
    return Interval(float(array.mean()), half, seeds)


def band(curves: Sequence[Points], points: int = CURVE_POINTS) -> Band:
    """Average the curves of all seeds at the same costs, from 0 to where the first of them ends."""
    costs = np.linspace(0.0, min(curve[-1][0] for curve in curves), points)
    rows = np.array([accuracy_at(curve, costs) for curve in curves])
    intervals = [interval(column) for column in rows.T.tolist()]
    return Band(
        cost=costs.tolist(),
        mean=[at.mean for at in intervals],
        low=[None if at.half is None else at.mean - at.half for at in intervals],
        high=[None if at.half is None else at.mean + at.half for at in intervals],
    )


def accuracy_at(curve: Points, costs: Floats) -> Floats:
    """Return the accuracy at each cost, by interpolation."""
    at, accuracy = np.array(curve, np.float64).T
    accuracies: Floats = np.interp(costs, at, accuracy)
    return accuracies


def cost_ratio(curve: Points, reference: Points, levels: int = LEVELS) -> float | None:
    """Return the cost of a curve for the same accuracies, relative to a reference: 1.05 = 5 % more.

    Both are the sum of the costs to reach `levels` accuracies, at equal distances from the start of the reference to
    the highest accuracy that both reach. That uses all points, while the cost of one accuracy depends on the noise of
    two. None where the curve has less than half of the reference's rise, since low accuracies alone are mostly noise,
    and where the reference has no rise or no cost.
    """
    start = reference[0][1]
    highest, goal = (max(accuracy for _, accuracy in points) for points in (curve, reference))
    top = min(highest, goal)
    if goal <= start or top - start < (goal - start) / 2:
        return None
    accuracies = np.linspace(start, top, levels + 1)[1:].tolist()
    costs, of_reference = ([cost_to_reach(points, level) for level in accuracies] for points in (curve, reference))
    total = sum(cost for cost in of_reference if cost is not None)
    return sum(cost for cost in costs if cost is not None) / total if total else None


def cost_to_reach(curve: Points, accuracy: float) -> float | None:
    """Return the first cost at which a curve has an accuracy, by interpolation; None if it never has."""
    (before, low), *_ = curve
    if low >= accuracy:
        return before
    for cost, high in curve[1:]:
        if high >= accuracy:
            return before + (cost - before) * (accuracy - low) / (high - low)
        before, low = cost, high
    return None
