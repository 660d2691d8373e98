"""Checks of guarantees 9 and 11: every prompt and step comes once, and every wait is explained.

Each has the sentence of its guarantee as docstring and yields violations. `checker` has the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from replaybuf.wire.ledger import AckRecord, BatchRecord
from replaybuf.wire.wait_reasons import REASONS
from tests.chaos.adapter_checks import adapters_take_turns
from tests.chaos.fault_checks import issued_too_early
from tests.chaos.history import OK, Prompt
from tests.chaos.ledger_walk import walk
from tests.chaos.run_history import RunHistory
from tests.chaos.trainer_checks import of_trainers

BLOCKED_ON = ("producers", "trainer", "operator", "nothing")
LEGITIMATE_REJECTIONS = ("lost_lineage", "version_above_published")
"""Reasons that a rewind gives a producer which did nothing wrong; no other rejection can come."""


def every_prompt_and_step_once(run: RunHistory) -> Iterator[str]:
    """9. Every prompt index gets one stored group or a recorded reason; resume neither skips nor repeats."""
    stored = Counter(group.prompt for group in run.stored_groups().values() if group.prompt)
    for prompt, count in stored.items():
        if count > 1:
            yield f"prompt {prompt} is stored {count} times"
    trimmed = {sent.prompt for sent in run.sent_again if sent.outcome == "duplicate"}
    for sent in run.sent_again:
        if sent.outcome == "stored":
            yield f"group {sent.group_id} was not stored until it was sent again at rest"
    if any(drained.drained for drained in run.drained):  # no ticket is left
        missing = _up_to(run.issued()) - stored.keys() - run.failed() - trimmed
        if missing:
            yield f"prompts {sorted(missing)[:20]} were skipped ({len(missing)} in all)"
    yield from _issued_after_stored(run)
    yield from issued_too_early(run)
    for sent in run.sent:
        if sent.outcome == "rejected" and sent.reason not in LEGITIMATE_REJECTIONS:
            yield f"group {sent.group_id} of prompt {sent.prompt_index} was rejected as {sent.reason}"
    yield from adapters_take_turns(run)
    for entry, record, before in walk(run.ledger):
        if isinstance(record, AckRecord) and (record.step != before.step or record.step not in before.standing):
            yield f"entry {entry}: step {record.step} is acked, the next one is {before.step}"
        if isinstance(record, BatchRecord) and record.step != before.next_step:
            yield f"entry {entry}: step {record.step} is assembled, the next one is {before.next_step}"
    for call in of_trainers(run):
        if call.outcome in ("wrong-step", "conflict") and call.epoch == run.epoch_before(call.at_s):
            yield f"the trainer of epoch {call.epoch}, in order, was refused: {call}"


def no_silent_wait(run: RunHistory) -> Iterator[str]:
    """11. Every "no batch" and "no ticket" names the reason, what is there, what is missing and who has to act."""
    waits = [asked.waiting for asked in run.asked if asked.outcome == OK and asked.body is None]
    waits += [taken.waiting for taken in run.tickets if taken.outcome == OK and not taken.tickets]
    for waiting in waits:
        if _unexplained(waiting):
            yield f"a wait is not explained: {_unexplained(waiting)}"
    for seen in run.states:
        if seen.state["waiting"] is not None and _unexplained(seen.state["waiting"]):
            yield f"the state does not explain its wait: {seen.state['waiting']}"
    for call in run.calls:
        if call.outcome in ("internal", "strategy-fault", "malformed"):
            yield f"a call was answered {call.outcome} by {call.server}: {call.detail}"
    for drained in run.drained:
        if not drained.drained:
            yield f"the load did not come to rest after the faults: {drained.stood}"


def _issued_after_stored(run: RunHistory) -> Iterator[str]:
    """Find tickets for a prompt whose group had been answered stored before they were asked for."""
    stored_s: dict[Prompt, float] = {}
    for sent in run.sent:
        if sent.prompt and sent.outcome in ("stored", "duplicate"):
            stored_s[sent.prompt] = min(sent.at_s, stored_s.get(sent.prompt, sent.at_s))
    for taken in run.tickets:
        for ticket, prompt_index, _ in taken.tickets:
            if stored_s.get((taken.adapter, prompt_index), taken.sent_s) < taken.sent_s:
                yield f"ticket {ticket} was issued after the group of prompt {prompt_index} had been stored"


def _up_to(prompts: set[Prompt]) -> set[Prompt]:
    """Name, of each adapter, all prompts up to the last of these."""
    last: dict[str, int] = {}
    for adapter, prompt_index in prompts:
        last[adapter] = max(prompt_index, last.get(adapter, 0))
    return {(adapter, index) for adapter, end in last.items() for index in range(end + 1)}


def _unexplained(waiting: dict[str, Any] | None) -> str | None:
    """Return what is missing in a waiting answer, or None."""
    if waiting is None:
        return "there is no reason at all"
    if waiting.get("reason") not in REASONS:
        return f"reason is {waiting.get('reason')!r}"
    if waiting.get("blocked_on") not in BLOCKED_ON:
        return f"blocked_on is {waiting.get('blocked_on')!r}"
    for name in ("have", "need"):
        amount = waiting.get(name) or {}
        if not all(isinstance(amount.get(unit), int) and amount[unit] >= 0 for unit in ("groups", "tokens")):
            return f"{name} is {amount}"
    return None
