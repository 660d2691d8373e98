"""Who may delete in a shared folder: only the trainer that has the run, as the service says right before the deletion.

A trainer that another one has fenced may go on for a while, for example after it was suspended. Step numbers alone do
not tell whose a folder is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from replaybuf.client.retries import Stopped
from replaybuf.errors import ServiceUnavailable

logger = logging.getLogger(__name__)

Confirm = Callable[[], object]
"""Asks the service once whether this trainer has the run. Raises `Fenced` if not, and `ServiceUnavailable`."""


def may_delete(confirm: Confirm) -> bool:
    """Return whether this trainer has the run; False if the service cannot be asked now. Raises `Fenced`."""
    try:
        confirm()
    except (ServiceUnavailable, Stopped) as error:
        logger.warning("old folders stay, because the service cannot be asked who has the run: %s", error)
        return False
    return True
