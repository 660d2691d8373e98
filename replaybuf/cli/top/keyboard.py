"""Keys of a terminal, read one at a time without Enter; a program without a terminal has none."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\r": "enter", "\n": "enter"}
KEYS |= {"\x1b": "escape", "\x7f": "escape", "\x03": "q", "k": "up", "j": "down", "\x04": "q", "b": "escape"}
"""Names of keys by what the terminal sends; a letter is its own name."""
_LONGEST = 64


class Keyboard:
    """Keys of standard input while `reading()`."""

    def __init__(self) -> None:
        self._descriptor = -1

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let the terminal send each key at once and show none; restore it at the end."""
        if not sys.stdin.isatty():
            yield
            return
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        try:
            tty.setcbreak(descriptor)
            self._descriptor = descriptor
            yield
        finally:
            self._descriptor = -1
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def wait(self, timeout_s: float, wake: int) -> list[str]:
        """Return the keys pressed within `timeout_s`; return early once `wake`, a descriptor, can be read."""
        watched = [wake] if self._descriptor < 0 else [wake, self._descriptor]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if self._descriptor not in ready:
            return []
        raw = os.read(self._descriptor, _LONGEST)
        return split_keys(raw.decode("utf-8", "replace")) if raw else ["q"]  # the terminal is gone


def split_keys(text: str) -> list[str]:
    """Split what a terminal sent at once into names of keys: an arrow is three characters."""
    keys: list[str] = []
    while text:
        size = 3 if text[:3] in KEYS else 1
        keys.append(KEYS.get(text[:size], text[:size]))
        text = text[size:]
    return keys
