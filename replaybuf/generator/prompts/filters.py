"""Filters of prompts at load: length in tokens, difficulty, duplicates.

A prompt index counts the prompts that stay. Which ones stay follows from sources, tokenizer and options alone, so a
restarted generator maps a ticket to the same prompt.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import Annotated, Any

from replaybuf.errors import Invalid
from replaybuf.generator.prompts.prompt import Prompt, invalid_row
from replaybuf.option_types import OptionGroup, Positive, about, group_option

REASONS = {
    "too_short": "min_tokens",
    "too_long": "max_tokens",
    "difficulty_missing": "difficulty_field",
    "difficulty_low": "min_difficulty",
    "difficulty_high": "max_difficulty",
    "duplicate": "drop_duplicates",
}
"""Why a prompt is dropped, with the key of `--prompt-filter` that drops it, in the order of the checks."""


@group_option
class PromptFilterOptions(OptionGroup, frozen=True, kw_only=True):
    """Prompts to drop at load, such as all longer ones: {"max_tokens": 512}.

    Raises `Invalid` for a contradiction.
    """

    min_tokens: Annotated[Positive | None, about("Minimum length in tokens, with the chat template.")] = None
    max_tokens: Annotated[
        Positive | None, about("Maximum length. Default: a prompt that does not fit ends the start.")
    ] = None
    difficulty_field: Annotated[
        str | None, about("Number in the metadata, such as stats.pass_rate. Prompts without it are dropped.")
    ] = None
    min_difficulty: Annotated[float | None, about("Minimum of that number.")] = None
    max_difficulty: Annotated[float | None, about("Maximum of that number.")] = None
    drop_duplicates: Annotated[
        bool, about("Keep the first prompt of each text, of all sources; white space does not count.")
    ] = False

    def __post_init__(self) -> None:
        for name in ("tokens", "difficulty"):
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
        self.active = options != PromptFilterOptions()
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
        if options.min_tokens is not None and length < options.min_tokens:
            return "too_short"
        if options.max_tokens is not None and length > options.max_tokens:
            return "too_long"
        if options.difficulty_field is not None:
            difficulty = _difficulty(prompt, options.difficulty_field)
            if difficulty is None:
                return "difficulty_missing"
            if options.min_difficulty is not None and difficulty < options.min_difficulty:
                return "difficulty_low"
            if options.max_difficulty is not None and difficulty > options.max_difficulty:
                return "difficulty_high"
        return "duplicate" if options.drop_duplicates and not self._is_first(prompt) else None

    def _is_first(self, prompt: Prompt) -> bool:
        content = " ".join(prompt.text.split()).encode() or prompt.token_ids.tobytes()  # special tokens have no text
        digest = hashlib.blake2b(content, digest_size=16).digest()
        first = digest not in self._contents
        self._contents.add(digest)
        return first


def nothing_left(source: str, dropped: Counter[str]) -> Invalid:
    """Describe a source of which the filters keep no prompt."""
    counts = ", ".join(f"{dropped[reason]} {reason}" for reason in REASONS if dropped[reason])
    keys = ", ".join(key for reason, key in REASONS.items() if dropped[reason])
    return Invalid(
        f"the filters drop all {dropped.total()} prompts of {source} ({counts}); change {keys} of "
        "--prompt-filter, or the source",
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
