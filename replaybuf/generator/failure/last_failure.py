"""The failure that ends a process before, or without, heartbeats of its own: one heartbeat reports it."""

from __future__ import annotations

import asyncio
import logging

from replaybuf.client.client import AsyncClient
from replaybuf.client.producers.failures import describe_failure
from replaybuf.errors import ReplaybufError, first_error

logger = logging.getLogger(__name__)

LAST_S = 1.5
"""Time limit of the last heartbeat of a process that ends with a failure."""
PRODUCER_FAULT = "producer_fault"
"""Reason of a failure that ends the process."""


async def report_failure(url: str, run: str, token: str | None, producer: str, error: Exception) -> None:
    """Send the traceback of `error` to the service, within `LAST_S`; log it if the service does not take it."""
    failure = describe_failure(PRODUCER_FAULT, first_error(error))
    try:
        async with asyncio.timeout(LAST_S), AsyncClient(url, run, token=token) as client:
            await client.send_heartbeat(producer, failure=failure)
    except (ReplaybufError, TimeoutError) as fault:
        why = str(fault) or f"no answer within {LAST_S:g} s"
        logger.warning("the service did not take the traceback of %s: %s", producer, why)
