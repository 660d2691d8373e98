"""How busy a server is, read from the gauges of its `GET /metrics`."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Rollouts in one server, of every client: `running` are sampled now, `waiting` queue for room."""

    running: int
    waiting: int


def read_load(exposition: str, running: str, waiting: str) -> Load | None:
    """Read both gauges from Prometheus text, summed over their labels; None where one is not there.

    A server of several data-parallel engines has one sample of each per engine. Raises `ValueError` where a sample is
    no finite number.
    """
    found = [_summed(exposition, name) for name in (running, waiting)]
    if found[0] is None or found[1] is None:
        return None
    return Load(found[0], found[1])


def _summed(exposition: str, name: str) -> int | None:
    samples = [
        line[len(name) :].rpartition("}")[2].partition("#")[0].split()
        for line in exposition.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    ]
    return sum(_whole(name, sample) for sample in samples) if samples else None


def _whole(name: str, sample: list[str]) -> int:
    value = float(sample[0]) if sample else math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} is {' '.join(sample) or 'missing'}")
    return int(value)
