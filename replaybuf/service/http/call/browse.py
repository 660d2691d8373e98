"""Stored groups for people: one group, pages of groups, dead letters, failed prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from replaybuf.errors import BrokenFrame, Gone, NotFound, SpillAway
from replaybuf.kernel.rows.column_table import SCORES
from replaybuf.kernel.state.group_life import describe_life
from replaybuf.kernel.state.group_query import GroupQuery
from replaybuf.kernel.state.lookups import find_group_state, list_dead_letters, steps_by_group
from replaybuf.service.bodies.assembly import FetchedGroups, fetch_groups, read_frames
from replaybuf.service.bodies.shown_rollout import PREVIEW, show_rollout
from replaybuf.service.http.call.group_pages import find_page
from replaybuf.service.http.call.text_search import search_groups
from replaybuf.service.run.samples import Samples
from replaybuf.service.run.served_run import Run
from replaybuf.store import IndexEntry
from replaybuf.store.keys import late_column
from replaybuf.wire.answer.browse import DeadLetters, FailedPrompt, FailedPrompts, GroupPage, GroupSummary, LifeMoment
from replaybuf.wire.answer.samples import ShownRollout
from replaybuf.wire.column.metadata import readable
from replaybuf.wire.decoding import prepared
from replaybuf.wire.frame import decode_frame
from replaybuf.wire.group import Group, split_rollouts
from replaybuf.wire.plan import decode_late
from replaybuf.wire.text.model_tokenizer import Tokenizer

MOST_PIECES = 2_000
"""Tokens of a completion that are shown one by one."""
LONGEST_TEXT_TOKENS = 1 << 17
"""Longer sequences have no text: the tokenizer would hold the event loop."""
MOST_PREVIEW_TOKENS = 1 << 20
"""Tokens of the groups that one page reads: about 10 MB. The groups behind them have no preview."""


async def describe_group(
    run: Run, group_id: str, tokenizer: Tokenizer | None, *, pieces: bool = False
) -> dict[str, Any]:
    """Return one group with its rollouts, also as text if there is a tokenizer: the fields of `StoredGroup`.

    With `pieces`, also the text of each of the first `MOST_PIECES` tokens of a completion.

    Raises `NotFound`, and `Gone` once its history is trimmed.
    """
    number = (await run.journal.store.groups.find_numbers(run.name, [group_id]))[0]
    entries = await run.journal.store.groups.read_entries(run.name, [number]) if number else []
    if number is not None and number <= run.state.trimmed and not entries:
        detail = f"group {group_id!r} has number {number}; the history of groups up to {run.state.trimmed} is trimmed"
        raise Gone(detail, name="group_id", value=group_id, bound=run.state.trimmed)
    if number is None or not entries:
        raise NotFound(f"run {run.name} has no group {group_id!r}", name="group_id", value=group_id)
    frames = await fetch_frames(run, entries)
    summary = summarize(run, entries[0], steps_by_group(run.state, [number])[number])
    life = _describe_life(run, entries[0], summary)
    content = await read_content(frames[number], tokenizer, pieces=pieces)
    if content["rollouts"] is None:
        content["samples"] = (await run.samples.of_groups(summary["batches"])).get(group_id, [])
    return summary | {"life": life} | content


def _describe_life(run: Run, entry: IndexEntry, summary: Mapping[str, Any]) -> list[LifeMoment]:
    oldest = int(entry.values["policy_version"])
    return describe_life(
        run.state,
        entry.number,
        entry.strings.adapter,
        summary["batches"],
        versions=(oldest, int(entry.values["policy_version_max"]), oldest + int(entry.values["staleness_at_write"])),
        stored_s=summary["arrival_s"],
        ticket_s=entry.strings.ticket_s,
    )


class StoredFrames(NamedTuple):
    """The payload key of a group, its frame, and the frames of its late columns by name; None = missing."""

    payload_key: str
    frame: bytes | None
    late: dict[str, bytes | None]


async def fetch_frames(run: Run, entries: Sequence[IndexEntry]) -> dict[int, StoredFrames]:
    """Fetch the frames of groups, by number."""
    late = run.state.pool.columns.late_of([entry.number for entry in entries])
    contents = await read_frames(run.journal.store, run.name, entries, late)
    frames: dict[int, StoredFrames] = {}
    for entry in entries:
        key, names = entry.strings.payload_key, late.get(entry.number, ())
        frames[entry.number] = StoredFrames(
            key, contents[key], {name: contents[late_column(key, name)] for name in names}
        )
    return frames


async def read_content(stored: StoredFrames, tokenizer: Tokenizer | None, *, pieces: bool = False) -> dict[str, Any]:
    """Return rollouts and metadata of a group, both None without its frame; `detail` of a broken one."""
    content: dict[str, Any] = {"rollouts": None, "metadata": None}
    if stored.frame is not None:
        try:
            # In a thread: a group may have 64 MB, and must not hold up a batch.
            content |= await asyncio.to_thread(_content, stored, stored.frame, tokenizer, MOST_PIECES if pieces else 0)
        except BrokenFrame as error:
            content["detail"] = error.detail
    return content


def _content(stored: StoredFrames, frame: bytes, tokenizer: Tokenizer | None, pieces: int) -> dict[str, Any]:
    """Return the rollouts and metadata of a frame, with arrays instead of lists. Raises `BrokenFrame`."""
    group = decode_late(decode_frame(frame), stored.late, stored.payload_key)
    rollouts = list(split_rollouts(group))
    for rollout in rollouts:
        ids = (rollout["prompt_ids"], rollout["completion_ids"])
        if tokenizer is not None and max(map(len, ids)) <= LONGEST_TEXT_TOKENS:
            rollout["prompt_text"], rollout["completion_text"] = tokenizer.decode(ids, special_tokens=True)
            if pieces:
                rollout["completion_pieces"] = tokenizer.split(rollout["completion_ids"][:pieces])
    # Raw: users may nest it in any way, and it is small.
    return {"rollouts": rollouts, "metadata": msgspec.Raw(msgspec.json.encode(readable(group.metadata)))}


async def list_groups(
    run: Run, query: GroupQuery, after: int | None, limit: int, *, preview: bool = False
) -> GroupPage:
    """Return a page of groups that match a query; with `preview`, one rollout of each."""
    page = await _find_groups(run, query, after, limit)
    if preview:
        shown = await _preview_groups(run, page.groups, query)
        groups = [msgspec.structs.replace(group, preview=shown.get(group.number)) for group in page.groups]
        page = msgspec.structs.replace(page, groups=groups)
    return page


async def _preview_groups(run: Run, groups: Sequence[GroupSummary], query: GroupQuery) -> dict[int, ShownRollout]:
    """Return one rollout of each group by its number, for those that have bytes or a sample."""
    stored: list[int] = []
    left = MOST_PREVIEW_TOKENS
    for group in groups:
        left -= group.tokens
        if group.state != "retired" and left >= 0:
            stored.append(group.number)
    try:
        fetched = await fetch_groups(run.journal.store, run.name, stored, run.state.pool.columns)
    except SpillAway:  # the page shows what it can
        fetched = FetchedGroups([], {}, {})
    matches = {group.number: group.match.place for group in groups if group.match is not UNSET}
    shown = await asyncio.to_thread(_show, fetched, query, run.samples, matches)
    others = [group for group in groups if group.number not in shown]
    samples = await run.samples.of_groups([step for group in others for step in group.batches])
    return shown | {group.number: samples[group.group_id][0] for group in others if group.group_id in samples}


def _show(
    fetched: FetchedGroups, query: GroupQuery, samples: Samples, matches: Mapping[int, int]
) -> dict[int, ShownRollout]:
    return {
        number: show_rollout(group, matches.get(number, _place(group, query)), samples.tokenizer, PREVIEW)
        for number, group in fetched.groups.items()
    }


def _place(group: Group, query: GroupQuery) -> int:
    """Return the place of the rollout that people look for in this order; the first one where any will do."""
    match query.order:
        case "reward":
            return int(np.argmax(group.rewards) if query.desc else np.argmin(group.rewards))
        case "longest_tokens":
            return int(np.argmax(group.lengths))
    return 0


async def _find_groups(run: Run, query: GroupQuery, after: int | None, limit: int) -> GroupPage:
    if query.contains is None:
        numbers, following = await find_page(run, query, after, limit)
        return GroupPage(groups=await _summaries(run, numbers), next=following)
    page = await search_groups(run, query, after, limit)
    groups = [
        msgspec.structs.replace(group, match=page.matches[group.number])
        for group in await _summaries(run, [*page.matches])
    ]
    return GroupPage(groups=groups, next=page.next, searched=page.searched)


async def describe_dead_letters(run: Run, after: int, limit: int) -> DeadLetters:
    """Return a page of the dead letters that were not purged, with their reasons."""
    numbers = list_dead_letters(run.state, after, limit)
    return DeadLetters(dead_letters=await _summaries(run, numbers), next=numbers[-1] if len(numbers) == limit else None)


def list_failed_prompts(run: Run, limit: int) -> FailedPrompts:
    """Return the newest `limit` failed prompts, oldest first."""
    newest = list(run.state.failed.newest.values())[-limit:]
    prompts = [msgspec.convert(failed, prepared(FailedPrompt), from_attributes=True) for failed in newest]
    return FailedPrompts(failed=len(run.state.failed.prompts), failed_prompts=prompts)


async def _summaries(run: Run, numbers: list[int]) -> list[GroupSummary]:
    entries, steps = await run.journal.store.groups.read_entries(run.name, numbers), steps_by_group(run.state, numbers)
    summaries: list[GroupSummary] = []
    for entry in entries:
        with contextlib.suppress(Gone):  # trimmed after its number was found
            summaries.append(GroupSummary(**summarize(run, entry, steps[entry.number])))
    return summaries


def summarize(run: Run, entry: IndexEntry, steps: list[int]) -> dict[str, Any]:
    """Return the fields of `GroupSummary`. Raises `Gone` for a freed group whose history is trimmed."""
    place, reason = find_group_state(run.state, entry.number)
    index, rows = run.state.index, run.state.index.rows_of([entry.number])
    # Late columns change the scores of the row, and not those of the entry.
    scores = {name: float(index[name][rows[0]] if len(rows) else entry.values[name]) for name in SCORES}
    prompt_index = int(entry.values["prompt_index"])
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
        **scores,
        "times_sampled": int(index["times_sampled"][rows[0]]) if len(rows) else len(steps),
        "late_columns": run.state.pool.columns.late_of([entry.number]).get(entry.number, []),
        "ticket_s": entry.strings.ticket_s,
    }
