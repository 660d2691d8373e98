"""Filters of prompts at load: length in tokens, difficulty, duplicates.

A prompt index counts the prompts that stay. Which ones stay follows from sources, tokenizer and options alone, so a
restarted generator maps a ticket to the same prompt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from typing import Any

from cyclopts.types import PositiveInt

from replaybuf.errors import Invalid
from replaybuf.generator.prompts.prompt import Prompt, invalid_row

REASONS = {
    "too_short": "--min-prompt-tokens",
    "too_long": "--max-prompt-tokens",
    "difficulty_missing": "--difficulty-field",
    "difficulty_low": "--min-difficulty",
    "difficulty_high": "--max-difficulty",
    "duplicate": "--drop-duplicate-prompts",
}
"""Why a prompt is dropped, with the option that drops it, in the order of the checks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFilterOptions:
    """Which prompts to drop at load; by default none."""

    min_prompt_tokens: PositiveInt | None = None
    """Minimum length of a prompt in tokens, with the chat template; shorter prompts are dropped at load."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum length of a prompt in tokens, with the chat template; longer prompts are dropped at load. Default: a
    prompt that does not fit the run or the engines ends the start."""
    difficulty_field: str | None = None
    """Number in the metadata of a prompt, such as pass_rate or stats.pass_rate, for min_difficulty and max_difficulty.
    Prompts without it are dropped at load."""
    min_difficulty: float | None = None
    """Minimum of the difficulty field; prompts below it are dropped at load."""
    max_difficulty: float | None = None
    """Maximum of the difficulty field; prompts above it are dropped at load."""
    drop_duplicate_prompts: bool = False
    """Keep the first of all prompts with the same text, of all sources; white space does not count."""

    @property
    def active(self) -> bool:
        """Whether a prompt can be dropped."""
        return self != PromptFilterOptions()

    def check(self) -> None:
        """Raise `Invalid` where options contradict each other."""
        for name in ("prompt_tokens", "difficulty"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                raise Invalid(
                    f"min_{name} is {low}; max_{name} is {high}: no prompt is between them",
                    name=f"min_{name}",
                    value=low,
                    bound=high,
                )
        bounded = self.min_difficulty is not None or self.max_difficulty is not None
        if bounded != (self.difficulty_field is not None):
            missing = "difficulty_field" if bounded else "min_difficulty or max_difficulty"
            raise Invalid(f"{missing} is missing: the field and its bounds belong together", name=missing)


class PromptFilter:
    """Decides about the prompts of all sources, one after another. `dropped`: prompts by reason."""

    def __init__(self, options: PromptFilterOptions) -> None:
        options.check()
        self.active = options.active
        self.dropped: Counter[str] = Counter()
        self._options = options
        self._contents: set[bytes] = set()

    def keeps(self, prompt: Prompt) -> bool:
        """Return whether a prompt stays; count it if not. Raises `Invalid` for a difficulty that is not numeric."""
        reason = self._reason(prompt)
        if reason is not None:
            self.dropped[reason] += 1
        return reason is None

    def _reason(self, prompt: Prompt) -> str | None:
        options, length = self._options, len(prompt.token_ids)
        if options.min_prompt_tokens is not None and length < options.min_prompt_tokens:
            return "too_short"
        if options.max_prompt_tokens is not None and length > options.max_prompt_tokens:
            return "too_long"
        if options.difficulty_field is not None:
            difficulty = _difficulty(prompt, options.difficulty_field)
            if difficulty is None:
                return "difficulty_missing"
            if options.min_difficulty is not None and difficulty < options.min_difficulty:
                return "difficulty_low"
            if options.max_difficulty is not None and difficulty > options.max_difficulty:
                return "difficulty_high"
        return "duplicate" if options.drop_duplicate_prompts and not self._is_first(prompt) else None

    def _is_first(self, prompt: Prompt) -> bool:
        content = " ".join(prompt.text.split()).encode() or prompt.token_ids.tobytes()  # special tokens have no text
        digest = hashlib.blake2b(content, digest_size=16).digest()
        first = digest not in self._contents
        self._contents.add(digest)
        return first


def nothing_left(source: str, dropped: Counter[str]) -> Invalid:
    """Describe a source of which the filters keep no prompt."""
    counts = ", ".join(f"{dropped[reason]} {reason}" for reason in REASONS if dropped[reason])
    options = ", ".join(option for reason, option in REASONS.items() if dropped[reason])
    return Invalid(
        f"the filters drop all {dropped.total()} prompts of {source} ({counts}); change {options}, or the source",
        name="prompts",
        value=source,
        bound="at least 1 prompt",
    )


def _difficulty(prompt: Prompt, field: str) -> float | None:
    """Return the number at a path in the metadata, None where it is absent or null."""
    value: Any = prompt.metadata
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise invalid_row(prompt.where, f"metadata.{field} is {value!r}; the difficulty must be a number")
    return float(value)
