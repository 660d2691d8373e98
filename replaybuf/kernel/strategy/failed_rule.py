"""Failed prompts: their record, and the rule that alarms, pauses or finishes a run with too many of them.

The rule compares the share of failed prompts with `tickets.max_failed_share`. Pure, as `decide`.
"""

from __future__ import annotations

from replaybuf.kernel.state.failed_prompts import FAILED_SHARE, FailedShare
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
        stored=None if _max_share(state) is None else state.stored,
        at_s=now_s,
    )


def read_share(state: RunState) -> FailedShare | None:
    """Return the failed share of the newest prompts; None = the run has no such rule."""
    return None if _max_share(state) is None else state.failed.window.read(state.stored)


def explain_exceeded(state: RunState) -> str | None:
    """Describe an exceeded share; None = it is not exceeded, or the run has no such rule."""
    share, most = read_share(state), _max_share(state)
    if share is None or most is None or not share.exceeds(most):
        return None
    last = next(reversed(state.failed.newest.values()), None)
    return (
        f"{FAILED_SHARE}: {share.failed} of the last {share.ended} prompts failed; tickets.max_failed_share is "
        f"{most:g}; the last one failed for: {last.reason if last and last.reason else 'no reason given'}"
    )


def decide_failed_share(state: RunState, now_s: float) -> ConfigRecord | None:
    """Decide to pause or finish a running run whose share is exceeded, as `tickets.on_failed_share` says."""
    config, why = state.config, explain_exceeded(state)
    if config is None or why is None or state.state != "running" or config.tickets.on_failed_share == "alarm":
        return None
    return ConfigRecord(
        config=recorded(config),
        max_uses=state.max_uses,
        state="paused" if config.tickets.on_failed_share == "pause" else "finished",
        reason=why,
        at_s=now_s,
    )


def _max_share(state: RunState) -> float | None:
    return state.config.tickets.max_failed_share if state.config else None
