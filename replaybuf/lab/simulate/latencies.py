"""How long recorded groups occupied their slots, and how much of it is due to the load of the engines.

A group occupies its slot from its ticket to its arrival: it generates, then its reward may take long. Engines slow down
under load. With n of the slots generating on average while the group did, the model is::

    latency = slowdown * (base + per_token * longest) + reward,  slowdown = 1 - load_share * (1 - n / slots)

`load_share`, base and per_token are those with the least absolute error, so that a long tail of rewards does not
change them. What a group takes much longer than the fit is its reward.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

LEAST_S = 1e-3
_SHARES = np.linspace(0.0, 1.0, 41)
_LEAST_GAIN = 0.05
"""Least part of the error that engines which slow down must explain: below it, chance does."""
_REWARD_FROM = 6.0
"""A latency above the fit by so many times the median error ends with a reward."""
_FEWEST_GROUPS = 30
_MOST_GROUPS = 1000
"""Groups that the fit looks at, spread evenly over the recording."""
_ROUNDS = 12
Seconds = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds that groups occupy their slots while all slots generate, [groups]; `reward_s`: part after generation."""

    slots: int
    total_s: Seconds
    reward_s: Seconds
    load_share: float


def measure_latencies(tickets_s: Seconds, arrivals_s: Seconds, longest: Seconds, slots: int) -> Latencies:
    """Return the latencies of groups, of which some have a ticket: the others (NaN) have the median.

    `longest`: tokens of the longest completions; `slots`: as the producers reported, 0 = the most groups at a time.
    """
    has_ticket = np.isfinite(tickets_s)
    starts_s = tickets_s[has_ticket]
    measured = np.maximum(arrivals_s[has_ticket] - starts_s, LEAST_S)
    slots = slots or int(_busy(starts_s, starts_s + measured)[1].max())
    load_share, slowdown, rewards = _fit_load(starts_s, measured, longest[has_ticket], slots)
    at_full_load = (measured - rewards) / slowdown + rewards
    total_s, reward_s = np.full(len(tickets_s), np.median(at_full_load)), np.zeros(len(tickets_s))
    total_s[has_ticket], reward_s[has_ticket] = at_full_load, rewards
    return Latencies(slots, total_s, reward_s, load_share)


def _busy(starts_s: Seconds, ends_s: Seconds) -> tuple[Seconds, Seconds]:
    """Return the times at which the number of groups in generation changes, and the number from each on."""
    times = np.concatenate([starts_s, ends_s])
    order = np.lexsort((np.repeat([1, 0], len(starts_s)), times))  # an arrival frees its slot for a ticket
    changes = np.repeat([1.0, -1.0], len(starts_s))[order]
    return times[order], np.cumsum(changes)


def _mean_busy(starts_s: Seconds, ends_s: Seconds) -> Seconds:
    """Return the mean number of groups in generation while each group is."""
    times, counts = _busy(starts_s, ends_s)
    area = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])
    own = np.interp(ends_s, times, area) - np.interp(starts_s, times, area)
    means: Seconds = own / (ends_s - starts_s)
    return means


def _fit_load(starts_s: Seconds, latencies: Seconds, longest: Seconds, slots: int) -> tuple[float, Seconds, Seconds]:
    """Return the share of the load, and the slowdown and reward of each group."""
    rewards = np.zeros(len(latencies))
    if len(latencies) < _FEWEST_GROUPS:
        return 0.0, np.ones(len(latencies)), rewards
    share, slowdown = 0.0, np.ones(len(latencies))
    for _ in range(3):  # from the second time on without the slots that only wait for rewards
        idle = 1 - np.minimum(_mean_busy(starts_s, starts_s + latencies - rewards) / slots, 1.0)
        step = -(-len(latencies) // _MOST_GROUPS)
        fits = [_fit(latencies[::step], longest[::step], 1 - share * idle[::step]) for share in _SHARES]
        best = int(np.argmin([error for error, *_ in fits]))
        if fits[best][0] > (1 - _LEAST_GAIN) * fits[0][0]:
            best = 0
        share = float(_SHARES[best])
        slowdown = 1 - share * idle
        _, base_s, token_s = fits[best]
        expected = np.maximum(slowdown * (base_s + token_s * longest), LEAST_S)
        longer = latencies - expected
        rewards = np.where(longer > _REWARD_FROM * np.median(np.abs(longer)), longer, 0.0)
    return share, slowdown, rewards


def _fit(latencies: Seconds, longest: Seconds, slowdown: Seconds) -> tuple[float, float, float]:
    """Fit base and seconds per token by least absolute error; return the mean error, and both."""
    columns = np.stack([slowdown, slowdown * longest], axis=1)
    weights, fitted = np.ones(len(latencies)), [0.0, 0.0]
    for _ in range(_ROUNDS):  # groups of one length leave the two undetermined, so not `solve`
        weighted = columns.T * weights
        fitted = np.linalg.lstsq(weighted @ columns, weighted @ latencies, rcond=None)[0].tolist()
        weights = 1 / np.maximum(np.abs(latencies - columns @ fitted), LEAST_S)
    return float(np.abs(latencies - columns @ fitted).mean()), fitted[0], fitted[1]
