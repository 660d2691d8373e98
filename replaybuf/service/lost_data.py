"""Acceptance of a loss: an operator lets a run go on without what Redis lost."""

from __future__ import annotations

import logging

from replaybuf.errors import Conflict, counted
from replaybuf.service.host import Service
from replaybuf.wire.answer.run_status import AcceptedLoss, LossRequest
from replaybuf.wire.config import check_run_name
from replaybuf.wire.ledger import LossRecord, encode_record

logger = logging.getLogger(__name__)


async def accept_loss(service: Service, name: str, request: LossRequest, *, by: str) -> AcceptedLoss:
    """Let a run go on from what Redis holds, with a ledger record of what is missing.

    Nobody leads such a run, so any server may do this. Redis changes the run in one step, and only if it lacks just
    what the operator has seen; every server that knows more reads the run again before it writes. Raises `Conflict`.
    """
    check_run_name(name)
    async with service.replacing(name):
        loss = await service.store.runs.read_loss(name)
        if loss is None:
            raise Conflict(f"Redis lacks nothing of run {name}; there is no loss to accept", name="run", value=name)
        missing = loss.entries, loss.groups
        seen = missing == (request.entries, request.groups)
        record = LossRecord(entries=loss.entries, groups=loss.groups, by=by, at_s=service.clock.wall())
        if not seen or not await service.store.runs.accept_loss(name, loss, encode_record(record)):
            detail = (
                f"entries are {request.entries} and groups {request.groups}; Redis lacks {lacks(*missing)} of {name}: "
                "send these numbers if you accept that"
            )
            raise Conflict(detail, name="entries", value=[request.entries, request.groups], bound=list(missing))
        logger.critical("loss accepted run=%s entries=%d groups=%d by=%s", name, loss.entries, loss.groups, by or "-")
    left = loss.shown
    return AcceptedLoss(
        run=name, entries=loss.entries, groups=loss.groups, last_entry=left.entry, last_group=left.group
    )


def lacks(entries: int, groups: int) -> str:
    """Say what is missing."""
    return f"{entries} ledger {'entry' if entries == 1 else 'entries'} and {counted(groups, 'group')}"
