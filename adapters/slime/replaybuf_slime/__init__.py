"""slime trains from a replaybuf run: `rollout.generate_rollout` and `ReplaybufDataSource`."""

from __future__ import annotations

from replaybuf_slime.data_source import ReplaybufDataSource
from replaybuf_slime.rollout import generate_rollout

__all__ = ["ReplaybufDataSource", "generate_rollout"]
