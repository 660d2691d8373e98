"""Latency of each recorded group, from its slot being free to its arrival, by the number of slots.

Groups start in the order of their prompts, each in the slot that is free first, and not before its policy version is
published: a window that was full opens then. So with the number of slots, the ledger and the arrivals, each start
follows::

    start of group i = max(first free slot, publication of its version), at most its arrival

The number of slots is what generators report by heartbeats. Without it, groups that were in generation at the same time
give the least number.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

LEAST_S = 1e-3
Times = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


def measure_latencies(arrivals_s: Times, versions: Whole, published_s: Mapping[int, float], slots: int) -> Times:
    """Return the seconds that each group occupied its slot [n], at least 1 ms; groups are in the order of prompts.

    The start of the first group of a slot is not known: producers may have come later than the run. Such groups have
    the median of the others, if there are others.
    """
    first_s = float(arrivals_s.min())
    free = [first_s] * min(slots, len(arrivals_s))
    latencies = np.empty(len(arrivals_s))
    for number, (arrival_s, version) in enumerate(zip(arrivals_s.tolist(), versions.tolist(), strict=True)):
        start_s = max(heapq.heappop(free), published_s.get(version, first_s))
        latencies[number] = max(arrival_s - start_s, LEAST_S)
        heapq.heappush(free, arrival_s)
    known = latencies[len(free) :]
    if len(known):
        latencies[: len(free)] = np.median(known)
    return latencies


def least_slots(arrivals_s: Times, versions: Whole, published_s: Mapping[int, float]) -> int:
    """Return the most groups that were in generation at a publication, at least 1.

    A group of an older version that arrives after a publication was in generation then.
    """
    counts = [((versions < version) & (arrivals_s > at_s)).sum() for version, at_s in published_s.items()]
    return max(1, int(max(counts, default=0)))
