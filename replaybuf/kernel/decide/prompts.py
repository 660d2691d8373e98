"""Decide how prompts go on without a group: as failed, or issued again because their group was too stale."""

from __future__ import annotations

from collections.abc import Sequence

from replaybuf.kernel.rows.index import NO_PROMPT_INDEX
from replaybuf.kernel.state.lookups import max_failed_share
from replaybuf.kernel.state.reissues import MOST_WAITING, newest_numbers
from replaybuf.kernel.state.run_state import RunState
from replaybuf.kernel.state.tickets import Ticket
from replaybuf.kernel.strategy.selection import Selector
from replaybuf.kernel.strategy.usability import StalePolicies
from replaybuf.wire.config import RunConfig
from replaybuf.wire.ledger import FailedPromptRecord


def decide_failed_prompt(state: RunState, ticket: Ticket, reason: str, now_s: float) -> FailedPromptRecord:
    """Decide that the prompt of a ticket ends without a group."""
    return FailedPromptRecord(
        adapter=ticket.adapter,
        prompt_index=ticket.prompt_index,
        outcome="failed",
        attempts=ticket.attempt,
        reason=reason,
        stored=None if max_failed_share(state) is None else state.stored,
        at_s=now_s,
    )


def list_reissued(state: RunState, selector: Selector, numbers: Sequence[int]) -> list[int]:
    """List the too stale groups among `numbers` whose prompts are issued again.

    A group that a batch used was trained. A prompt without a ticket is not ours to issue, and one with a later group
    needs none.
    """
    config, reissues, index = selector.config, state.reissues, state.index
    if not numbers or not may_reissue(config):
        return []
    rows = index.rows_of(numbers)
    unused = (index["times_sampled"][rows] == 0) & (index["prompt_index"][rows] != NO_PROMPT_INDEX)
    rows = rows[unused & StalePolicies.of(config).have("reissue", index["source"][rows])]
    newest, names = newest_numbers(index, rows), state.adapters_by_hash
    chosen: list[int] = []
    columns = (index[name][rows].tolist() for name in ("adapter", "prompt_index", "number"))
    for code, prompt_index, number in zip(*columns, strict=True):
        adapter = names.get(code, "")
        issued = prompt_index < selector.inputs.prompts_issued(adapter)
        again = reissues.count((adapter, prompt_index)) < config.max_reissues
        if issued and again and newest[code, prompt_index] == number:
            chosen.append(number)
    return chosen[: max(0, MOST_WAITING - len(reissues.waiting))]


def may_reissue(config: RunConfig) -> bool:
    """Return whether a run issues some prompts again."""
    return config.max_reissues > 0 and "reissue" in StalePolicies.of(config).used
