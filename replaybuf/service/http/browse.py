"""Looking at stored groups: one, a page of them, the dead letters."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from replaybuf.errors import BrokenFrame, Gone, Invalid, NotFound
from replaybuf.kernel.index import DEAD
from replaybuf.kernel.state_view import GROUP_STATES
from replaybuf.service.run.run import Run
from replaybuf.store import IndexEntry
from replaybuf.wire.frame import decode_frame
from replaybuf.wire.group import group_to_json
from replaybuf.wire.tokenizer import Tokenizer


async def describe_group(run: Run, group_id: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Render one group with its rollouts (null once its bytes are gone), with a tokenizer as text too.

    Raises `NotFound`, `Gone` once trimmed.
    """
    number = (await run.journal.store.groups.find_numbers(run.name, [group_id]))[0]
    entries = await run.journal.store.groups.read_entries(run.name, [number]) if number else []
    if number is not None and number <= run.state.trimmed and not entries:
        raise Gone(
            f"group {group_id!r} was freed and its history trimmed; trimmed is all up to number {run.state.trimmed}",
            name="group_id",
            value=group_id,
            bound=run.state.trimmed,
        )
    if number is None or not entries:
        raise NotFound(f"run {run.name} has no group {group_id!r}", name="group_id", value=group_id)
    answer = _summary(run, entries[0])
    frame = (await run.journal.store.groups.read_frames({entries[0].strings.payload_key: 0}))[0]
    answer["rollouts"] = answer["metadata"] = None
    if frame is not None:
        try:
            # In a thread: a group may have 64 MB, and nobody who waits for a batch waits for who looks.
            answer |= await asyncio.to_thread(_content, frame, tokenizer)
        except BrokenFrame as error:
            answer["detail"] = error.detail
    return answer


def _content(frame: bytes, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Render what a frame holds beside what the index knows. Raises `BrokenFrame`."""
    group = msgspec.to_builtins(group_to_json(decode_frame(frame)))
    if tokenizer is not None:
        for rollout in group["rollouts"]:
            ids = (rollout["prompt_ids"], rollout["completion_ids"])
            rollout["prompt_text"], rollout["completion_text"] = tokenizer.decode(ids, special_tokens=True)
    return {"rollouts": group["rollouts"], "metadata": group["metadata"]}


async def list_groups(run: Run, state: str | None, after: int, limit: int) -> dict[str, Any]:
    """Render a page of groups in the order they were stored; `next` is the `after` of the next page, or null."""
    if state is not None and state not in GROUP_STATES:
        raise Invalid(
            f"state is {state!r}; it must be one of {', '.join(GROUP_STATES)}",
            name="state",
            value=state,
            bound=GROUP_STATES,
        )
    numbers = run.state.list_numbers(state, after, limit)
    groups = [_summary(run, entry) for entry in await run.journal.store.groups.read_entries(run.name, numbers)]
    return {"groups": groups, "next": numbers[-1] if len(numbers) == limit else None}


async def describe_dead_letters(run: Run) -> dict[str, Any]:
    """Render every dead letter that was not purged, with its reason."""
    index = run.state.index
    numbers = index["number"][index["state"] == DEAD].tolist()
    return {
        "dead_letters": [
            _summary(run, entry) for entry in await run.journal.store.groups.read_entries(run.name, numbers)
        ]
    }


def list_failed_prompts(run: Run, limit: int) -> dict[str, Any]:
    """Render the newest `limit` prompts that came to their end without a group, the oldest of them first."""
    newest = list(run.state.failures.values())[-limit:]
    told = [msgspec.structs.asdict(failed) for failed in newest]
    return {"failed": len(run.state.failed_prompts), "failed_prompts": told}


def _summary(run: Run, entry: IndexEntry) -> dict[str, Any]:
    place, reason = run.state.group_state(entry.number)
    rows = run.state.index.rows_of([entry.number])
    prompt_index = int(entry.values["prompt_index"])
    steps = run.state.steps_of(entry.number)
    return {
        "group_id": entry.strings.group_id,
        "number": entry.number,
        "state": place,
        "reason": reason,
        "batches": steps,
        "prompt_id": entry.strings.prompt_id,
        "prompt_index": None if prompt_index < 0 else prompt_index,
        "adapter": entry.strings.adapter,
        "policy_version": int(entry.values["policy_version"]),
        "tokens": int(entry.values["tokens"]),
        "group_size": int(entry.values["rollouts"]),
        "longest_tokens": int(entry.values["longest_tokens"]),
        "truncated": int(entry.values["truncated"]),
        "source": int(entry.values["source"]),
        "arrival_s": float(entry.values["arrival_s"]),
        "reward_mean": float(entry.values["reward_mean"]),
        "reward_std": float(entry.values["reward_std"]),
        "advantage_abs_mean": float(entry.values["advantage_abs_mean"]),
        "times_sampled": int(run.state.index["times_sampled"][rows[0]]) if len(rows) else len(steps),
    }
