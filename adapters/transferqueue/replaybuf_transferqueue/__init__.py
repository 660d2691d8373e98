"""Durable storage for TransferQueue and verl, in Valkey or Redis.

Importing this package registers the back end `Replaybuf`. verl imports it by its entry point. Other programs import it
in every process that uses TransferQueue, or start Ray with
`runtime_env={"worker_process_setup_hook": "replaybuf_transferqueue.register"}`.
"""

from __future__ import annotations

import replaybuf_transferqueue.manager  # noqa: F401 - registers the back end
from replaybuf.client.peers import warn_if_untested
from replaybuf_transferqueue.records import Later, Missing, Restored
from replaybuf_transferqueue.restoring import restore
from replaybuf_transferqueue.settings import BACKEND, Settings

__all__ = ["BACKEND", "Later", "Missing", "Restored", "Settings", "register", "restore"]

TESTED = ("0.1.11", "0.1.12")
warn_if_untested("replaybuf-transferqueue", "TransferQueue", *TESTED)


def register() -> None:
    """Do nothing: the import has registered the back end. Ray's workers call it when they start."""
