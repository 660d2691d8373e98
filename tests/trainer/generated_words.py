"""Prompts and rewards of generators: their processes import this file, and no torch with it."""

from __future__ import annotations

import functools

from replaybuf.generator.environments import Score
from replaybuf.generator.prompts import Prompt

ADDED = "poem.v1"
WANTED = {"code": "abcdefghijklm", "math": "0123456789+-*/=", ADDED: "nopqrstuvwxyz"}
"""The reward is the share of these characters in the completion."""


def backwards() -> list[dict[str, str]]:
    """Prompts of the character tokenizer."""
    return [{"prompt": word, "answer": word[::-1]} for word in ("culla>", "parla>", "luna>", "sole>", "mare>", "neve>")]


def words(adapter: str) -> list[dict[str, str]]:
    """Prompts of a tenant."""
    return [{"prompt": word, "answer": WANTED[adapter]} for word in ("culla>", "parla>", "luna>", "sole>", "neve>")]


code, math, poem = (functools.partial(words, name) for name in ("code", "math", ADDED))


class Share:
    """Rewards the share of wanted characters."""

    def check(self, prompt: Prompt) -> None:
        """Accept every prompt."""

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        wanted = prompt.answer or ""
        return Score(sum(letter in wanted for letter in completion_text) / max(1, len(completion_text)))
