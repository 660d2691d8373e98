"""Describe a failure for the service: its traceback, without secrets of the environment, and not too long.

A producer sends the description with its next heartbeat; `replaybuf groups failures` and the console show it.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from replaybuf.wire.contract import TRACEBACK_BYTES, ProducerFailure
from replaybuf.wire.names import is_shown

LEAST_SECRET_CHARS = 6
"""Shorter values of the environment are ordinary words and numbers."""
WINDOW_CHARS = 16_384
"""Characters kept at each end of a text before the search for secrets, which takes 10 ms for so many."""
_LEAST_MARGIN_CHARS = 1024
_HEAD_BYTES = TRACEBACK_BYTES // 4
_CUT = "\n... %d bytes left out ...\n"
_SPECIAL = re.compile(r"\\+|[^\w.~-]|[^\x00-\x7f]")
"""A run of backslashes, or a character that some way of writing escapes."""
_AT_START = frozenset(os.environ.items())
"""Also searched for: a program may remove a secret from its environment after reading it."""
_PATTERNS = (
    (re.compile(r"(?<=://)[^\s/@]+@"), "***@"),
    (re.compile(r"(?i)\b(bearer|basic)(\s+)[^\s'\"]{6,}"), r"\1\2***"),
    (re.compile(r"\brb_[\w-]{20,}"), "rb_***"),
)
"""User info of addresses, credentials of an Authorization header, tokens of this service."""


def describe_failure(reason: str, error: BaseException | str, prompt_index: int | None = None) -> ProducerFailure:
    """Describe a failure for `send_heartbeat`. `reason`: a word, as for `return_ticket`; `error`: what was raised."""
    return ProducerFailure(reason=reason, prompt_index=prompt_index, traceback=render_traceback(error))


def render_traceback(error: BaseException | str) -> str:
    """Render traceback and notes of an error, or a text, redacted, in at most `TRACEBACK_BYTES`."""
    text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
    return shorten(redact(text).rstrip(), TRACEBACK_BYTES)


def redact(text: str) -> str:
    """Replace values of environment variables by `$NAME`, and credentials in headers and addresses by `***`.

    Also replaces values as `repr`, JSON and addresses write them. Other characters than printable ones, line breaks and
    tabs become U+FFFD. Of a text above `2 * WINDOW_CHARS` the middle is left out, a little more than necessary: at a
    cut there may be a part of a secret.
    """
    secrets = _secrets(_AT_START | frozenset(os.environ.items()))
    if len(text) <= 2 * WINDOW_CHARS:
        return _replaced(text, secrets)
    margin = max(_LEAST_MARGIN_CHARS, *(len(secret.value) for secret in secrets))
    head, tail = _replaced(text[:WINDOW_CHARS], secrets), _replaced(text[-WINDOW_CHARS:], secrets)
    return f"{head[: max(0, len(head) - margin)]}\n... of {len(text)} characters ...\n{tail[margin:]}"


def shorten(text: str, most_bytes: int) -> str:
    """Leave out the middle of a text that has more than `most_bytes` bytes as UTF-8."""
    data = text.encode()
    if len(data) <= most_bytes:
        return text
    cut = _CUT % len(data)
    head, tail = data[:_HEAD_BYTES], data[-(most_bytes - _HEAD_BYTES - len(cut)) :]
    return head.decode(errors="ignore") + cut + tail.decode(errors="ignore")


class _Secret(NamedTuple):
    """A value to search for. `anchor`: its longest part that is never escaped, which is quick to find."""

    value: str
    name: str
    anchor: str
    pattern: re.Pattern[str]


def _replaced(text: str, secrets: Sequence[_Secret]) -> str:
    for secret in secrets:
        if secret.anchor in text:
            text = secret.pattern.sub(f"${secret.name}", text)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return "".join(letter if is_shown(letter) else "\N{REPLACEMENT CHARACTER}" for letter in text)


@functools.lru_cache(maxsize=2)
def _secrets(environment: frozenset[tuple[str, str]]) -> list[_Secret]:
    """List the values to search for, the longest first: one may be a part of another."""
    shortest_last = sorted(environment, key=lambda pair: (-len(pair[0]), pair))
    names = {value.strip(): name for name, value in shortest_last}
    values = sorted((value for value in names if len(value) >= LEAST_SECRET_CHARS), key=len, reverse=True)
    return [_Secret(value, names[value], max(_SPECIAL.split(value), key=len), _pattern(value)) for value in values]


@functools.lru_cache(maxsize=4096)
def _pattern(value: str) -> re.Pattern[str]:
    """Match a value, also with its characters escaped, once or several times: a `repr` may hold another."""
    parts = re.split(f"({_SPECIAL.pattern})", value)
    return re.compile("".join(_escaped(part) if place % 2 else re.escape(part) for place, part in enumerate(parts)))


def _escaped(character: str) -> str:
    if character.startswith("\\"):
        return rf"(?:\\{{{len(character)},}}+|(?:%5C)+)"
    code, after = ord(character), {"\n": "n", "\r": "r", "\t": "t", " ": r"\+"}.get(character, "")
    pair = re.findall("....", character.encode("utf-16-be", "surrogatepass").hex())
    forms = [re.escape(character), f"U{code:08x}", f"x{code:02x}", r"\\*+".join(f"u{half}" for half in pair)]
    percent = "".join(f"%{byte:02X}" for byte in character.encode(errors="replace"))
    return rf"\\*+(?:{'|'.join([percent, *forms, *filter(None, [after])])})"
