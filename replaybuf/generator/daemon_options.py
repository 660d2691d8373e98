"""Options of the generator's main loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from replaybuf.generator.engines import Sampling
from replaybuf.generator.environments.length_penalty import LengthPenalty
from replaybuf.generator.fleet.concurrency import Bounds
from replaybuf.generator.inflight import PATIENCE_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How to generate.

    - `producer`: name of this process; `adapter`: whose groups to make, `""` for a run without adapters
    - `advantage`: an estimator of `kernel.strategy.advantages`
    - `length_penalty`: added to every reward, None = no penalty
    - `metadata`: added to every group; `compress`: compress frames
    - `max_inflight_groups` slots; `min_inflight_groups` of them, up to all, generate, as the engines' gauges say
      (None = all slots)
    - `rollouts_per_request`: None = the whole group; `min_group_size`: fewest rollouts of a group that lost some to
      faults, None = all
    - `request_seed`: base of the seed of every request; None = the engines choose
    - `poll_wait_ms`: how long the service may hold a call; short, so that a stop can wait for the answer and return its
      tickets
    - `service_patience_s`: see `InFlight.retry`
    """

    producer: str
    sampling: Sampling
    adapter: str = ""
    advantage: str = "grpo"
    length_penalty: LengthPenalty | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_inflight_groups: int = 64
    min_inflight_groups: int | None = None
    compress: bool = False
    rollouts_per_request: int | None = None
    min_group_size: int | None = None
    request_seed: int | None = None
    poll_wait_ms: int = 1000
    service_patience_s: float = PATIENCE_S
    report_every_s: float = 10.0
    metrics_file: Path | None = None

    @property
    def bounds(self) -> Bounds:
        """Bounds of the number of groups generating at the same time. Raises `Invalid`."""
        least = self.max_inflight_groups if self.min_inflight_groups is None else self.min_inflight_groups
        return Bounds(least, self.max_inflight_groups)
