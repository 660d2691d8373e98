"""A stage as a process of its own: find groups that lack a column, compute it, add it.

The service knows which groups lack the column, so a stage keeps no state: killed at any moment, it goes on with the
groups that still lack it. Several stages of one column are harmless, because the same values again change nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random

import numpy as np

from replaybuf.client.client import AsyncClient
from replaybuf.client.producers.failures import describe_failure
from replaybuf.errors import (
    Conflict,
    DataLost,
    EngineFault,
    Gone,
    Invalid,
    NoRoom,
    NotFound,
    ServiceUnavailable,
)
from replaybuf.generator.stage.aggregation import Window
from replaybuf.generator.stage.stages import Rollout, Stage, Stages
from replaybuf.wire.answer.browse import StoredGroup, StoredRollout

logger = logging.getLogger(__name__)

PAGE_GROUPS = 64
POLL_S = 0.5
"""Pause between passes; groups that do not fill a micro-batch wait for others for as long."""
AWAY_PAUSE_S = 2.0
MOST_TRIES = 3
"""Tries per group and process; then the failure is reported, and the group is left to another process."""


class StageDaemon:
    """Adds the column of a stage to the groups of a run until the run is finished.

    `added` counts groups that got the column from this process, `passed` those that were drawn, dropped or done by
    another stage meanwhile, `failed` tries without a usable result, `given_up` groups with `MOST_TRIES` of them.
    """

    def __init__(self, client: AsyncClient, stage: Stage, producer: str) -> None:
        self.added = self.passed = self.failed = self.given_up = 0
        self._client = client
        self._column = stage.column
        self._stages = Stages[str]([stage])
        self._producer = producer
        self._waiting: set[str] = set()
        self._tries: dict[str, int] = {}

    async def run(self) -> None:
        """Work until the end. Raises what no later try can mend: no such run, no permission, a call that hangs."""
        away = False
        while True:
            try:
                before = self.added
                await self._pass()
                idle, away = self.added == before, False
                if idle and not self._waiting and (await self._client.get_run()).state == "finished":
                    return
            except (ServiceUnavailable, NoRoom, DataLost) as error:  # as producers do
                if not away:
                    logger.warning("the service cannot work now, trying again: %s", error.detail)
                idle = away = True
            if idle or self._waiting:
                await asyncio.sleep(AWAY_PAUSE_S if away else POLL_S)

    async def _pass(self) -> None:
        """Go once through the groups that lack the column, oldest first; the rest leaves if none of them is new."""
        lacking: set[str] = set()
        after, filling = None, False
        while True:
            page = await self._client.list_groups(lacks=self._column, limit=PAGE_GROUPS, after=after)
            ids = [group.group_id for group in page.groups]
            lacking.update(ids)
            for group_id in random.sample(ids, len(ids)):  # several stages work on different groups of a page
                if group_id not in self._waiting and self._tries.get(group_id, 0) < MOST_TRIES:
                    filling = True
                    await self._take(group_id)
            after = page.next
            if after is None:
                break
        await self._complete(None if filling else self._stages.flush())
        self._tries = {group_id: tries for group_id, tries in self._tries.items() if group_id in lacking}

    async def _take(self, group_id: str) -> None:
        """Add a group to the window. One that has failed is computed alone, so that it costs no other group a try."""
        try:
            stored = await self._client.get_group(group_id)
        except (Gone, NotFound) as error:
            self._pass_over(group_id, error.detail)
            return
        rollouts = [_rollout(stored, rollout) for rollout in stored.rollouts or ()]
        if not rollouts:
            self._pass_over(group_id, "its rollouts are freed")
        elif group_id in self._tries:
            await self._complete(Window([group_id], [rollouts]))
        else:
            self._waiting.add(group_id)
            await self._complete(self._stages.add(group_id, rollouts))

    async def _complete(self, window: Window[str, Rollout] | None) -> None:
        if window is None:
            return
        self._waiting.difference_update(window.groups)
        for group_id, outcome in zip(window.groups, await self._stages.compute(window), strict=True):
            if isinstance(outcome, EngineFault):
                await self._fail(group_id, outcome)
                continue
            try:
                added = await self._client.add_columns(group_id, {self._column: outcome[self._column].values})
            except (Conflict, Gone, NotFound) as error:
                self._pass_over(group_id, error.detail)
            except Invalid as error:
                await self._fail(group_id, error)
            else:
                self.added += added
                self.passed += not added
                logger.info("added=%d column=%s group=%s", added, self._column, group_id)

    def _pass_over(self, group_id: str, detail: str) -> None:
        self.passed += 1
        logger.info("passed column=%s group=%s: %s", self._column, group_id, detail)

    async def _fail(self, group_id: str, error: EngineFault | Invalid) -> None:
        tries = self._tries[group_id] = self._tries.get(group_id, 0) + 1
        self.failed += 1
        logger.warning("failed column=%s group=%s try=%d: %s", self._column, group_id, tries, error.detail)
        if tries == MOST_TRIES:
            self.given_up += 1
            detail = f"gave up {self._column} of group {group_id} after {tries} tries"
            logger.error("%s", detail)
            error.add_note(detail)
            await self._client.send_heartbeat(self._producer, failure=describe_failure("stage_failed", error))


def _rollout(stored: StoredGroup, rollout: StoredRollout) -> Rollout:
    completion = np.array(rollout.completion_ids, np.int32)
    mask = [True] * len(completion) if rollout.completion_mask is None else rollout.completion_mask
    return Rollout(np.array(rollout.prompt_ids, np.int32), completion, np.array(mask, np.bool_), stored)
