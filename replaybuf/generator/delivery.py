"""Delivery of scored groups: append those that are ready together, and hold those of an unpublished version.

::

    put ──► ready ──► append ──► stored | duplicate
     │        ▲         ├──────► ticket returned (rejected, lost_lineage)
     │        │         └──────► ready again while the service is away
     └──► held┘ after publication
           └───────────────────► ticket returned (ticket expired, version taken back)
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

from replaybuf.errors import Invalid, Malformed, ReplaybufError, RunFinished, TooLarge, counted
from replaybuf.generator.inflight import InFlight, Job
from replaybuf.tracing import spans
from replaybuf.wire.contract import AppendResult, Policy

logger = logging.getLogger(__name__)

APPEND_GROUPS = 64
"""Maximum number of groups in one append."""
ABOVE_PUBLISHED = "version_above_published"
LOST_LINEAGE = "lost_lineage"
RUN_FINISHED = "run_finished"
EARLY_SHARE = 0.9
"""A long poll answered before this share of its time would be answered at once again."""
_EARLY_PAUSE_S = 0.2
_UNKNOWN = -1


class Delivery:
    """Appends groups to the buffer. The slots in flight bound the ready and the held groups.

    `on_published` is called with the published version of every answer.
    """

    def __init__(
        self,
        inflight: InFlight,
        on_published: Callable[[int], None],
        *,
        poll_wait_ms: int,
        compress: bool = False,
        adapter: str = "",
    ) -> None:
        self._inflight = inflight
        self._on_published = on_published
        self._poll_wait_ms = poll_wait_ms
        self._compress = compress
        self._adapter = adapter
        self._published = _UNKNOWN
        self._ready: deque[Job] = deque()
        self._held: list[Job] = []

    @property
    def published(self) -> int | None:
        """The published version; None while unknown."""
        return None if self._published == _UNKNOWN else self._published

    @property
    def holding(self) -> bool:
        """Whether groups wait for the publication of their version."""
        return bool(self._held)

    def learn_published(self, version: int) -> None:
        """Record the published version of an answer.

        Answers overtake each other, and within one history versions only grow. So only `follow_policy`, whose answers
        come in order, detects a rewind.
        """
        self._published = max(self._published, version)
        self._on_published(self._published)

    def lose_above(self, version: int) -> None:
        """Mark the versions above `version` of all jobs in flight as lost: their numbers will mean other weights.

        The next answer to `follow_policy` returns the tickets of held groups.
        """
        for job in self._inflight.jobs.values():
            job.rewound_to = version if job.rewound_to is None else min(version, job.rewound_to)

    async def put(self, jobs: Sequence[Job]) -> None:
        """Queue groups for append; hold those whose version is not published yet."""
        for job in jobs:
            newest = job.scored.policy_version_max
            if job.rewound_to is not None and newest > job.rewound_to:
                detail = f"holds tokens of version {newest}; versions above {job.rewound_to} were taken back"
                await self._inflight.return_ticket(job, LOST_LINEAGE, detail)
            else:
                (self._held if newest > self._published else self._ready).append(job)
        await self._inflight.notify()

    # ------------------------------------------------------------------ append

    async def append_ready(self) -> None:
        """Loop: append the ready groups together. Ends where a stop comes while the service is away."""
        inflight, clock, last_s, going = self._inflight, asyncio.get_running_loop().time, -math.inf, True
        while going:
            await inflight.until(lambda: bool(self._ready))
            await inflight.gather(lambda: len(self._ready), lambda: len(inflight.jobs), last_s)
            going = await self._append([self._ready.popleft() for _ in range(min(len(self._ready), APPEND_GROUPS))])
            last_s = clock()

    async def _append(self, jobs: list[Job]) -> bool:
        """Append groups, however long the service is away; return False where a stop comes first."""
        inflight, groups = self._inflight, [job.scored for job in jobs]
        try:
            with spans.operation("append", [job.span for job in jobs]):
                results = await inflight.retry(
                    "append", lambda: inflight.client.append(groups, compress=self._compress)
                )
        except RunFinished as error:
            logger.info("%s came too late: %s", counted(len(jobs), "group"), error)
            inflight.no_more_tickets = True
            await inflight.release(jobs)
            return True
        except (Invalid, Malformed, TooLarge) as error:
            return await self._append_singly(jobs, error)
        if results is None:
            return False
        settled = list(zip(jobs, results, strict=True))
        for job, result in settled:
            self._count(job, result)
        await inflight.release([job for job, result in settled if result.status != "rejected"])
        for job, result in settled:
            if result.status == "rejected":
                await self._return_rejected(job, result)
        return True

    async def _append_singly(self, jobs: list[Job], error: ReplaybufError) -> bool:
        """Append one group at a time, to find the group that made the service reject the whole append."""
        if len(jobs) == 1:
            await self._inflight.return_ticket(jobs[0], "append_refused", error.detail)
            return True
        for job in jobs:
            if not await self._append([job]):
                return False
        return True

    def _count(self, job: Job, result: AppendResult) -> None:
        progress = self._inflight.progress
        spans.end_group(job.span, result.status)
        if result.status == "stored":
            progress.record_stored(job.scored, asyncio.get_running_loop().time() - job.started_at_s)
        elif result.status == "duplicate":
            progress.duplicates += 1

    async def _return_rejected(self, job: Job, result: AppendResult) -> None:
        reason, detail = f"rejected_{result.reason}", result.detail or ""
        if result.reason in (LOST_LINEAGE, RUN_FINISHED):
            reason = result.reason
        elif result.reason == ABOVE_PUBLISHED:
            # The version was published when the group was sent; only a rewind lowers the published version.
            reason = LOST_LINEAGE
            detail = f"version {job.scored.policy_version_max} is no longer published"
        await self._inflight.return_ticket(job, reason, detail)

    # ------------------------------------------------------------------ policy

    async def follow_policy(self) -> None:
        """Loop: learn of publications, and release the held groups of a published version.

        The trainer loads the engines first and publishes the version afterwards, so groups of the next version are
        normal.
        """
        inflight, clock = self._inflight, asyncio.get_running_loop().time
        while True:
            asked_s, before = clock(), self._published
            policy = await inflight.retry("policy", self._ask_policy)
            if policy is None:
                return
            if policy.version < before:
                logger.warning("the run was rewound: published version %d, was %d", policy.version, before)
                self._published = policy.version
                self.lose_above(policy.version)
                inflight.abort_sampling(LOST_LINEAGE, f"a rewind took back the versions above {policy.version}")
            self.learn_published(policy.version)
            await self._release_held(clock())
            if policy.version <= before and clock() - asked_s < EARLY_SHARE * self._poll_wait_ms / 1000:
                await asyncio.sleep(_EARLY_PAUSE_S)

    async def _ask_policy(self) -> Policy:
        return await self._inflight.client.get_policy(self.published, self._poll_wait_ms, self._adapter)

    async def _release_held(self, now_s: float) -> None:
        """Queue the held groups whose version is published; return the tickets that have expired."""
        held, self._held = self._held, []
        expired = [job for job in held if job.expires_at_s <= now_s and job.scored.policy_version_max > self._published]
        for job in expired:
            await self._inflight.return_ticket(job, ABOVE_PUBLISHED, "not published before the ticket expired")
        await self.put([job for job in held if job not in expired])
