"""Log the durability of the Redis server when it changes."""

from __future__ import annotations

import logging

from replaybuf.store import ServerReport

logger = logging.getLogger(__name__)


def log_durability(before: ServerReport | None, now: ServerReport) -> None:
    """Log what is weaker than requested, at the start and after a change."""
    if before and (before.summary, before.reasons) == (now.summary, now.reasons):
        return
    level = logging.WARNING if now.policy.level == "strict" else logging.INFO
    for reason in now.reasons:
        logger.log(level, "durability is %s, requested is %s: %s", now.durability, now.policy.level, reason)
    if before:
        logger.log(logging.INFO if not now.reasons else level, "durability is now %s", now.summary)
