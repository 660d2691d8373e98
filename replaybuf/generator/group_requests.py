"""Requests for the rollouts of one group: one for all of them, or several side by side."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from replaybuf.generator.engines import Sample, Sampling
from replaybuf.generator.fleet import Fleet
from replaybuf.generator.fleet.publication import joined, pieces
from replaybuf.generator.losses import Losses
from replaybuf.wire.group import Int32s


class GroupRequests:
    """Samples one group from a fleet, `per_request` rollouts per request (None = all in one).

    Several requests spread a group over the engines, and each fails for itself: `losses` counts its rollouts.
    """

    def __init__(self, fleet: Fleet, per_request: int | None, losses: Losses) -> None:
        self._fleet = fleet
        self._per_request = per_request
        self._losses = losses

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample completions, `sampling.n` less the lost ones. Raises as `Fleet.generate`."""
        parts = split(sampling, self._per_request)
        if len(parts) == 1:
            return await self._fleet.generate(prompt_ids, sampling, self._losses)
        works = [functools.partial(self._fleet.generate, prompt_ids, part, self._losses) for part in parts]
        samples = await self._losses.gather_rest(works, [part.n for part in parts])
        self._fleet.check_use(min(sample.policy_version for sample in samples))
        rollouts = [piece for sample in samples for piece in pieces(sample)]
        metadata = samples[0].metadata | {"sampling": sampling.record(), "requests": len(parts)}
        return dataclasses.replace(joined(rollouts, metadata), exact=all(sample.exact for sample in samples))


def split(sampling: Sampling, per_request: int | None) -> Sequence[Sampling]:
    """Split n completions into requests of at most `per_request`, each with a seed of its own if there is one.

    An engine gives completion i of a request the seed + i, so the seeds are those of one request for all.
    """
    size = per_request or sampling.n
    return [
        dataclasses.replace(
            sampling,
            n=min(size, sampling.n - start),
            seed=None if sampling.seed is None else sampling.seed + start,
        )
        for start in range(0, sampling.n, size)
    ]
