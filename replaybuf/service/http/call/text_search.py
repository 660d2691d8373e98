"""Search of stored groups by letters of their prompts and completions.

The index has no text, so a search decodes the token ids of group after group, within a bound per call. All searches
share one thread, in turns that are bounded by tokens: between two turns another search, or a call that waits for the
event loop, comes in, however large a group is.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

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
TURN_TOKENS = 32_768
"""Decoded per turn: 5 to 12 ms of processor time, with a vocabulary of bytes and with 4 letters per token alike."""
PIECE_COST = 64
"""Tokens whose decoding costs as much as the call for one piece: a group may have thousands of short rollouts."""
SHARED_TOKENS = 512
"""Tokens that two parts of a sequence share: more than a text of 256 bytes has."""
AROUND = 80
"""Letters before and behind a match."""

_THREAD = ThreadPoolExecutor(1, "text-search")


class TextPiece(NamedTuple):
    """Token ids of one rollout that are decoded at once."""

    place: int
    part: Literal["prompt", "completion"]
    token_ids: Int32s


class Turn(NamedTuple):
    """The result of a turn; a search that has not `ended` needs another one."""

    ended: bool
    match: TextMatch | None = None


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
        detail = (
            f"contains is {letters!r}; this service has no tokenizer, so its groups are token ids without text: "
            "start it with replaybuf serve --tokenizer FOLDER"
        )
        raise Invalid(detail, name="contains", value=letters)
    numbers, following = await find_page(run, query, after, SEARCHED_GROUPS)
    entries = await run.journal.store.groups.read_entries(run.name, numbers)
    matches: dict[int, TextMatch] = {}
    seen = size = 0
    for piece in _pieces(entries):
        keys = {entry.strings.payload_key: int(entry.values["frame_bytes"]) for entry in piece}
        frames = dict(zip(keys, await run.journal.store.groups.read_frames(run.name, keys), strict=True))
        for entry in piece:
            frame = frames[entry.strings.payload_key]
            match = await _search(_text_pieces(entry, frame), letters.casefold(), tokenizer)
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


async def _search(pieces: Iterator[TextPiece], letters: str, tokenizer: Tokenizer) -> TextMatch | None:
    """Return the first place of `letters` in the pieces, in as many turns as they need."""
    loop = asyncio.get_running_loop()
    while True:
        turn = await loop.run_in_executor(_THREAD, search_turn, pieces, letters, tokenizer)
        if turn.ended:
            return turn.match


def search_turn(pieces: Iterator[TextPiece], letters: str, tokenizer: Tokenizer) -> Turn:
    """Search the next pieces of a group for `letters`, in case-folded form, up to `TURN_TOKENS` tokens."""
    left = TURN_TOKENS
    for piece in pieces:
        if excerpt := _find(piece.token_ids, letters, tokenizer):
            return Turn(ended=True, match=TextMatch(piece.place, piece.part, *excerpt))
        left -= len(piece.token_ids) + PIECE_COST
        if left <= 0:
            return Turn(ended=False)
    return Turn(ended=True)


def _text_pieces(entry: IndexEntry, frame: bytes | None) -> Iterator[TextPiece]:
    try:
        group = decode_payload(entry.strings.payload_key, frame, int(entry.values["crc32c"]))
    except BrokenFrame:  # the group becomes a dead letter when a batch draws it
        return
    yield from text_pieces(group)


def text_pieces(group: Group) -> Iterator[TextPiece]:
    """Yield the prompts and completions of a group, long ones in parts of `TOKENS_AT_ONCE` that overlap."""
    prompt = b""
    for place, rollout in enumerate(split_rollouts(group)):
        # The rollouts of a group mostly have one prompt, which is searched once.
        if (raw := rollout["prompt_ids"].tobytes()) != prompt:
            prompt = raw
            yield from (TextPiece(place, "prompt", ids) for ids in _parts(rollout["prompt_ids"]))
        yield from (TextPiece(place, "completion", ids) for ids in _parts(rollout["completion_ids"]))


def _parts(ids: Int32s) -> Iterator[Int32s]:
    for start in range(0, max(1, len(ids) - SHARED_TOKENS), TOKENS_AT_ONCE - SHARED_TOKENS):
        yield ids[start : start + TOKENS_AT_ONCE]


def _find(ids: Int32s, letters: str, tokenizer: Tokenizer) -> tuple[str, str, str] | None:
    """Return what stands before the letters, the letters as they are written, and what stands behind them."""
    text = tokenizer.decode([ids], special_tokens=True)[0]
    folded = text.casefold()
    begin = folded.find(letters)
    if begin < 0:
        return None
    end = begin + len(letters)
    if len(folded) != len(text):  # the fold of "ß" is "ss"
        ends = list(itertools.accumulate(len(letter.casefold()) for letter in text))
        begin, end = bisect.bisect_right(ends, begin), bisect.bisect_left(ends, end) + 1
    return text[max(0, begin - AROUND) : begin], text[begin:end], text[end : end + AROUND]
