"""A stage as a process of its own: find groups that lack a column, compute it, add it.

The service knows which groups lack the column, so a stage keeps no state: killed at any moment, it goes on with the
groups that still lack it. Several stages of one column are harmless, because the same values again change nothing.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaybuf.client.client import Client
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
from replaybuf.generator.stage.logprobs import MODEL_PLUGIN, LogprobModel
from replaybuf.generator.stage.stages import Rollout
from replaybuf.plugins import entry_points as plugins
from replaybuf.wire.answer.browse import GroupSummary, StoredGroup

logger = logging.getLogger(__name__)

Compute = Callable[[StoredGroup], Sequence[Any]]
"""Returns a column of a group: values per token as one list or array per rollout, else one number per rollout."""
PAGE_GROUPS = 64
POLL_S = 0.5
AWAY_PAUSE_S = 2.0
MOST_TRIES = 3
"""Tries per group and process; the column of a group that fails as often is left to another process."""
MOST_REMEMBERED = 10_000


class StageDaemon:
    """Adds `column` to the groups of a run until the run is finished or `stop` is set.

    `added` counts groups that got the column from this process, `passed` those that were drawn, dropped or done by
    another stage meanwhile, `failed` calls of `compute` without a usable result.
    """

    def __init__(self, client: Client, column: str, compute: Compute, stop: threading.Event) -> None:
        self.added = self.passed = self.failed = 0
        self._client = client
        self._column = column
        self._compute = compute
        self._stop = stop
        self._tries: dict[str, int] = {}

    def run(self) -> None:
        """Work until the end. Raises what no later try can mend: no such run, no permission."""
        away = False
        while not self._stop.is_set():
            try:
                found = self._pass()
                away = False
                if not found and self._client.get_run().state == "finished":
                    return
            except (ServiceUnavailable, NoRoom, DataLost) as error:  # as producers do
                if not away:
                    logger.warning("the service cannot work now, trying again: %s", error.detail)
                away, found = True, 0
            if not found:
                self._stop.wait(AWAY_PAUSE_S if away else POLL_S)

    def _pass(self) -> int:
        """Go once through the groups that lack the column, oldest first; return to how many it was added."""
        before, after = self.added, None
        while not self._stop.is_set():
            page = self._client.list_groups(lacks=self._column, limit=PAGE_GROUPS, after=after)
            groups = [one for one in page.groups if self._tries.get(one.group_id, 0) < MOST_TRIES]
            for group in random.sample(groups, len(groups)):  # several stages work on different groups of a page
                if self._stop.is_set():
                    break
                self._work_on(group)
            after = page.next
            if after is None:
                break
        return self.added - before

    def _work_on(self, group: GroupSummary) -> None:
        try:
            stored = self._client.get_group(group.group_id)
            if stored.rollouts is None:
                self.passed += 1
            elif self._client.add_columns(group.group_id, {self._column: self._values(stored)}):
                self.added += 1
                logger.info("added column=%s group=%s", self._column, group.group_id)
            else:
                self.passed += 1
        except (Conflict, Gone, NotFound) as error:
            self.passed += 1
            logger.info("passed column=%s group=%s: %s", self._column, group.group_id, error.detail)
        except (EngineFault, Invalid) as error:
            self._count_failure(group.group_id, error.detail)

    def _values(self, stored: StoredGroup) -> Sequence[Any]:
        try:
            return self._compute(stored)
        except Exception as error:  # the user's code may raise anything
            raise EngineFault("stage_raised", f"{error!r}", name=self._column) from error

    def _count_failure(self, group_id: str, detail: str) -> None:
        self.failed += 1
        if len(self._tries) >= MOST_REMEMBERED:
            del self._tries[next(iter(self._tries))]
        self._tries[group_id] = self._tries.get(group_id, 0) + 1
        logger.warning("failed column=%s group=%s try=%d: %s", self._column, group_id, self._tries[group_id], detail)


def load_compute(function: str | None, model: Path | None) -> Compute:
    """Return the function MODULE:NAME, or one that asks the model in a folder for logprobs. Raises `Invalid`."""
    if (function is None) == (model is None):
        raise Invalid("set one of function and model", name="function", value=function, bound="MODULE:NAME")
    if function is not None:
        compute: Compute = plugins.load_object(function)
        return compute
    loaded: LogprobModel = plugins.load(plugins.LOGPROBS, MODEL_PLUGIN)(model)
    return lambda stored: loaded.logprobs([_rollout(one) for one in stored.rollouts or ()])


def _rollout(stored: Any) -> Rollout:
    completion = np.array(stored.completion_ids, np.int32)
    mask = [True] * len(completion) if stored.completion_mask is None else stored.completion_mask
    return Rollout(np.array(stored.prompt_ids, np.int32), completion, np.array(mask, np.bool_))
