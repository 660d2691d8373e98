"""Search of stored groups by letters of their prompts and completions.

The index has no text, so a search decodes the token ids of group after group, within a bound per call. All searches
share one thread: each decodes a few thousand tokens at once, so that the event loop soon has Python's lock again.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from replaybuf.errors import BrokenFrame, Invalid
from replaybuf.kernel.state.group_query import GroupQuery
from replaybuf.service.http.call.group_pages import find_page
from replaybuf.service.run.served_run import Run
from replaybuf.store import IndexEntry
from replaybuf.wire.answer.browse import SearchedGroups, TextMatch
from replaybuf.wire.group import Group, Int32s, split_rollouts
from replaybuf.wire.plan import decode_payload
from replaybuf.wire.text.model_tokenizer import Tokenizer

SEARCHED_GROUPS = 500
SEARCHED_BYTES = 32 << 20
"""Groups and bytes of frames that one call looks at: up to 1 s of one core. It looks at one group at least."""
PIECE_BYTES = 4 << 20
"""Frames in memory at once; a group alone may have 64 MiB."""
TOKENS_AT_ONCE = 2_048
"""Decoding them takes about 0.5 ms, during which the tokenizer has Python's lock."""
SHARED_TOKENS = 512
"""Tokens that two parts of a sequence share: more than a text of 256 bytes has."""
AROUND = 80
"""Letters before and behind a match."""

_THREAD = ThreadPoolExecutor(1, "text-search")


class FoundPage(NamedTuple):
    """Matches by number of their group, in the order of the query; where the next page starts; what was looked at."""

    matches: dict[int, TextMatch]
    next: int | None
    searched: SearchedGroups


async def search_groups(run: Run, query: GroupQuery, after: int | None, limit: int) -> FoundPage:
    """Return up to `limit` groups that meet a query with `contains`.

    Raises `Invalid` without a tokenizer, `SpillAway` if the spill folder cannot be read.
    """
    letters, tokenizer = query.contains or "", run.samples.tokenizer
    if tokenizer is None:
        raise Invalid(
            f"contains is {letters!r}; this service has no tokenizer, so its groups are token ids without text: "
            "start it with replaybuf serve --tokenizer FOLDER",
            name="contains",
            value=letters,
        )
    numbers, following = await find_page(run, query, after, SEARCHED_GROUPS)
    entries = await run.journal.store.groups.read_entries(run.name, numbers)
    matches: dict[int, TextMatch] = {}
    seen = size = 0
    for piece in _pieces(entries):
        keys = {entry.strings.payload_key: int(entry.values["frame_bytes"]) for entry in piece}
        frames = dict(zip(keys, await run.journal.store.groups.read_frames(run.name, keys), strict=True))
        for entry in piece:
            # One group per turn: another search, and a call that waits for the loop, come in between.
            frame = frames[entry.strings.payload_key]
            search = functools.partial(_search, entry, frame, letters.casefold(), tokenizer)
            match = await asyncio.get_running_loop().run_in_executor(_THREAD, search)
            seen, size = seen + 1, size + len(frame or b"")
            if match is not None:
                matches[entry.number] = match
            if len(matches) == limit or size >= SEARCHED_BYTES:
                last = entry.number if seen < len(entries) else following
                return FoundPage(matches, last, SearchedGroups(groups=seen, bytes=size))
    return FoundPage(matches, following, SearchedGroups(groups=seen, bytes=size))


def _pieces(entries: Sequence[IndexEntry]) -> Iterator[list[IndexEntry]]:
    """Yield the entries in lists whose frames have about `PIECE_BYTES`."""
    piece: list[IndexEntry] = []
    size = 0
    for entry in entries:
        frame_bytes = int(entry.values["frame_bytes"])
        if piece and size + frame_bytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(entry)
        size += frame_bytes
    if piece:
        yield piece


def _search(entry: IndexEntry, frame: bytes | None, letters: str, tokenizer: Tokenizer) -> TextMatch | None:
    try:
        group = decode_payload(entry.strings.payload_key, frame, int(entry.values["crc32c"]))
    except BrokenFrame:  # the group becomes a dead letter when a batch draws it
        return None
    return find_text(group, letters, tokenizer)


def find_text(group: Group, letters: str, tokenizer: Tokenizer) -> TextMatch | None:
    """Return the first place of `letters`, in case-folded form, in the texts of a group; None if there is none."""
    prompt = b""
    for place, rollout in enumerate(split_rollouts(group)):
        # The rollouts of a group mostly have one prompt, which is decoded once.
        if (raw := rollout["prompt_ids"].tobytes()) != prompt:
            prompt = raw
            if excerpt := _find(rollout["prompt_ids"], letters, tokenizer):
                return TextMatch(place, "prompt", *excerpt)
        if excerpt := _find(rollout["completion_ids"], letters, tokenizer):
            return TextMatch(place, "completion", *excerpt)
    return None


def _find(ids: Int32s, letters: str, tokenizer: Tokenizer) -> tuple[str, str, str] | None:
    """Return what stands before the letters, the letters as they are written, and what stands behind them."""
    for start in range(0, max(1, len(ids) - SHARED_TOKENS), TOKENS_AT_ONCE - SHARED_TOKENS):
        text = tokenizer.decode([ids[start : start + TOKENS_AT_ONCE]], special_tokens=True)[0]
        folded = text.casefold()
        begin = folded.find(letters)
        if begin < 0:
            continue
        end = begin + len(letters)
        if len(folded) != len(text):  # the fold of "ß" is "ss"
            ends = list(itertools.accumulate(len(letter.casefold()) for letter in text))
            begin, end = bisect.bisect_right(ends, begin), bisect.bisect_left(ends, end) + 1
        return text[max(0, begin - AROUND) : begin], text[begin:end], text[end : end + AROUND]
    return None
