"""Metrics that a trainer reports with its acks: loss, gradient norm, or what else it wants to see per step.

A row holds one float64 for each name, packed: 4,096 rows of 64 names take 2 MiB, as dicts they would take 30.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import msgspec

MOST_NAMES = 128
"""Names of a run, over all its steps; an ack brings at most 64."""
_MISSING = math.nan


class StepMetrics(msgspec.Struct):
    """Names of metrics in the order in which they first came, and what could not be kept.

    `missing`: values that are null, NaN or infinite; `left_out`: values of names beyond `MOST_NAMES`.
    """

    names: list[str] = []
    missing: int = 0
    left_out: int = 0

    def pack(self, reported: Mapping[str, float | None]) -> bytes:
        """Pack the metrics of one step, float64 by place of their names; new names are added."""
        values = array("d", [_MISSING]) * (len(self.names) if reported else 0)
        for name, value in reported.items():
            # The ledger has null for NaN and infinities: a fold after a restart must count them alike.
            if value is None or not math.isfinite(value):
                self.missing += 1
            elif name in self.names:
                values[self.names.index(name)] = value
            elif len(self.names) < MOST_NAMES:
                self.names.append(name)
                values.append(value)
            else:
                self.left_out += 1
        return values.tobytes()

    def columns(self, rows: Sequence[bytes]) -> dict[str, list[float | None]]:
        """Return one column per name that has a value in `rows`, which are packed; None = missing."""
        by_name = zip(self.names, zip_longest(*map(unpack, rows), fillvalue=_MISSING), strict=False)
        return {
            name: [None if math.isnan(value) else value for value in values]
            for name, values in by_name
            if not all(map(math.isnan, values))
        }


def unpack(row: bytes) -> array[float]:
    """Return the values of a packed row, by place of their names."""
    return array("d", row)


def merge_metrics(rows: Sequence[tuple[int, bytes]]) -> bytes:
    """Merge packed rows of so many steps each: means per step over the rows that have a value."""
    steps = [number for number, _ in rows]
    merged = array("d")
    for values in zip_longest(*(unpack(row) for _, row in rows), fillvalue=_MISSING):
        known = [(number, value) for number, value in zip(steps, values, strict=True) if not math.isnan(value)]
        merged.append(mean_per_step(known) if known else _MISSING)
    return merged.tobytes()


def mean_per_step(values: Sequence[tuple[int, float]]) -> float:
    """Return the mean of values, each of so many steps. It is exact for equal values: their chart is one number."""
    steps, first = sum(number for number, _ in values), values[0][1]
    if all(value == first for _, value in values):
        return first
    return sum(value * (number / steps) for number, value in values)  # a sum of products may be infinite
