"""Decide on failed prompts: their record, and what happens to a run with too many of them."""

from __future__ import annotations

from replaybuf.kernel.state.queries import explain_failed_share, max_failed_share
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import Ticket
from replaybuf.wire.config import recorded
from replaybuf.wire.ledger import ConfigRecord, TicketRecord


def decide_failed(state: RunState, ticket: Ticket, reason: str, now_s: float) -> TicketRecord:
    """Decide that the prompt of a ticket ends without a group."""
    return TicketRecord(
        adapter=ticket.adapter,
        prompt_index=ticket.prompt_index,
        outcome="failed",
        attempts=ticket.attempt,
        reason=reason,
        stored=None if max_failed_share(state) is None else state.stored,
        at_s=now_s,
    )


def decide_failed_share(state: RunState, now_s: float) -> ConfigRecord | None:
    """Decide to pause or finish a running run whose share is exceeded, as `tickets.on_failed_share` says."""
    config, why = state.config, explain_failed_share(state)
    if config is None or why is None or state.phase != "running" or config.tickets.on_failed_share == "alarm":
        return None
    return ConfigRecord(
        config=recorded(config),
        max_uses=state.max_uses,
        state="paused" if config.tickets.on_failed_share == "pause" else "finished",
        reason=why,
        at_s=now_s,
    )
