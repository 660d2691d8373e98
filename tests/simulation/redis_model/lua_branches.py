"""Branches of `library.lua`: marks each of them, so that a run shows which were taken."""

from __future__ import annotations

import re
from collections.abc import Iterator

BRANCH = re.compile(r"\b(?:then|else|do)\b")
COMMENT_OR_TEXT = re.compile(r"--.*|'[^']*'")


def find_branches(code: str) -> list[int]:
    """Return the line of each branch, from 1."""
    return [line for line, _ in _places(code)]


def mark_branches(code: str) -> str:
    """Return the code with a statement at the start of each branch, which sets `HITS[number]`."""
    lines = code.split("\n")
    for number, (line, column) in reversed(list(enumerate(_places(code)))):
        text = lines[line - 1]
        lines[line - 1] = f"{text[:column]} HITS[{number}] = true {text[column:]}"
    return "\n".join(lines)


def _places(code: str) -> Iterator[tuple[int, int]]:
    """Yield the line of each branch, and the column behind its keyword."""
    for line, text in enumerate(code.split("\n"), 1):
        blank = COMMENT_OR_TEXT.sub(lambda match: " " * len(match.group()), text)
        yield from ((line, match.end()) for match in BRANCH.finditer(blank))
