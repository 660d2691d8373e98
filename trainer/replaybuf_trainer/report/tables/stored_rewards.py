"""Reward parts of rollouts as the service stores them: a batch body has only their means."""

from __future__ import annotations

import logging

from replaybuf.client.client import Client
from replaybuf.errors import Forbidden, ReplaybufError
from replaybuf_trainer.options import TrainOptions

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class StoredRewards:
    """Looks groups up in the run of a training; without a run, or without the right to read groups, there are none."""

    def __init__(self, options: TrainOptions) -> None:
        self._client = Client(options.url, options.run, options.token, TIMEOUT_S) if options.run else None

    def parts_of(self, group_id: str) -> list[dict[str, float]]:
        """Return the reward parts of each rollout of a group; empty if they are not available."""
        if self._client is None:
            return []
        try:
            stored = self._client.get_group(group_id).rollouts or []
        except Forbidden as error:
            logger.warning("tables have no reward parts of single rollouts: %s", error.detail)
            self.close()
            return []
        except ReplaybufError as error:  # freed, or the service is away
            logger.debug("no reward parts of group %s: %s", group_id, error.detail)
            return []
        return [rollout.rewards for rollout in stored]

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
