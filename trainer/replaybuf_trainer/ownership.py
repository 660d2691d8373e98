"""Who may delete in a shared folder: only the trainer that has the run, as the service says right before each deletion.

A trainer that another one has fenced may go on for a while, for example after it was suspended. Step numbers alone do
not tell whose a folder is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

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


def delete_listed(folders: list[Path], confirm: Confirm) -> None:
    """Delete folders; ask before each, because a deletion may take minutes. Raises `Fenced`.

    The caller lists them before: a list that is made after an answer may have folders of a successor. If the service
    cannot be asked, the rest stays.
    """
    for folder in folders:
        if not may_delete(confirm):
            return
        shutil.rmtree(folder, ignore_errors=True)
