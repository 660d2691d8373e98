"""Prompts, and their order: the prompt index of a ticket alone decides which prompt it means.

`prompt_index` counts over the epochs: epoch = prompt_index // len, place = prompt_index % len in that epoch's order.
The order depends only on (seed, epoch), so restarted and parallel generators use the same prompt for the same ticket.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid
from replaybuf.wire.column.metadata import check_metadata
from replaybuf.wire.group import Int32s, TokenIds

_CACHED_EPOCHS = 4
"""Tickets of neighbouring epochs are out at the same time."""


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of a source of prompts. Exactly one of `prompt`, `messages`, `prompt_ids` is set."""

    prompt_id: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    answer: str | int | float | None = None
    metadata: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One task instance: `text` is what the model sees, `token_ids` int32 [P] the same as tokens.

    `where` names file and row for messages; `recorded` goes into the metadata of its groups.
    """

    prompt_id: str
    text: str
    token_ids: Int32s
    answer: str | None
    metadata: dict[str, Any]
    where: str
    recorded: dict[str, Any] = dataclasses.field(default_factory=dict)


class PromptOrder(Protocol):
    """Maps tickets to prompts; all generators of a run have the same one."""

    def at(self, prompt_index: int) -> Prompt:
        """Return the prompt of a ticket. Raises `PromptFault` if it cannot be made."""


class Encoder(Protocol):
    """The part of a tokenizer that prompts need; `replaybuf.wire.text.model_tokenizer.Tokenizer` has it."""

    vocab_size: int

    @property
    def folder(self) -> Path | None:
        """The model folder of the tokenizer; None without one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to token ids."""

    def decode(self, token_ids: Sequence[TokenIds]) -> list[str]:
        """Decode sequences of token ids."""

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Render chat messages to text."""


class Prompts:
    """The prompts of a finite source, by prompt index. `shuffle=False` keeps their order in every epoch."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        self._prompts = tuple(prompts)
        self._seed = seed % (1 << 64)
        self._shuffle = shuffle
        self._order = functools.lru_cache(maxsize=_CACHED_EPOCHS)(self._new_order)

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def at(self, prompt_index: int) -> Prompt:
        """Return the prompt of a ticket; `prompt_index` >= 0 counts over the epochs."""
        epoch, place = divmod(prompt_index, len(self))
        return self._prompts[int(self._order(epoch)[place])]

    def _new_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self))
        # Sorts raw counter output: any numpy release may change the draws of Generator.permutation.
        keys = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(len(self))
        return np.argsort(keys, kind="stable")


def new_prompt(name: str, where: str, line: PromptLine, encoder: Encoder) -> Prompt:
    """Tokenise one row. The default of `prompt_id` is `<name>/<hash of the content>`. Raises `Invalid`."""
    try:
        _check_form(line)
        text, token_ids = _text_and_ids(line, encoder)
    except Invalid as error:
        raise invalid_row(where, error.detail) from None
    return Prompt(
        prompt_id=line.prompt_id or f"{name}/{_content_hash(line)}",
        text=text,
        token_ids=np.array(token_ids, np.int32),
        answer=None if line.answer is None else str(line.answer),
        metadata=line.metadata,
        where=where,
    )


def invalid_row(where: str, what: str) -> Invalid:
    """Describe what is wrong with a row."""
    return Invalid(f"{where}: {what}", name="prompts", value=where)


def duplicate_id(prompt: Prompt, first: Prompt, *, generated: bool = False) -> Invalid:
    """Describe two rows with one `prompt_id`; `generated`: made from the content, which is then the same."""
    origin = ", made from its content," if generated else ""
    remedy = "; drop_duplicates of --prompt-filter keeps the first" if generated else ""
    return invalid_row(prompt.where, f"prompt_id {prompt.prompt_id!r}{origin} is already used in {first.where}{remedy}")


def _check_form(line: PromptLine) -> None:
    forms = ("prompt", "messages", "prompt_ids")
    present = [name for name in forms if getattr(line, name) is not None]
    if len(present) != 1:
        raise Invalid(f"has {' and '.join(present) or 'none'} of {', '.join(forms)}; exactly one is needed")
    if not getattr(line, present[0]):
        raise Invalid(f"{present[0]} is empty")
    if line.prompt is not None and not line.prompt.strip():
        raise Invalid("prompt is only white space")
    if line.prompt_id == "":
        raise Invalid("prompt_id is empty; leave it out to have it made from the content")
    for number, message in enumerate(line.messages or (), start=1):
        _check_message(number, message)
    check_metadata("metadata", line.metadata)  # it goes into every group of the prompt


def _check_message(number: int, message: dict[str, Any]) -> None:
    """Reject messages that a chat template renders as nothing, or as the word None."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise Invalid(f"messages: number {number} has no role")
    if content is None and message.get("tool_calls"):
        return
    if not content or (isinstance(content, str) and not content.strip()):
        raise Invalid(f"messages: number {number} ({role}) has no content")


def _content_hash(line: PromptLine) -> str:
    """Hash what the model sees and the answer: the id stays the same in another order of the rows."""
    content = (line.prompt, line.messages, line.prompt_ids, line.answer)
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=8).hexdigest()


def _text_and_ids(line: PromptLine, encoder: Encoder) -> tuple[str, list[int]]:
    if line.prompt_ids is not None:
        low, high = min(line.prompt_ids), max(line.prompt_ids)
        if low < 0 or high >= encoder.vocab_size:
            raise Invalid(f"prompt_ids from {low} to {high}; the tokenizer has ids from 0 to {encoder.vocab_size - 1}")
        return encoder.decode([line.prompt_ids])[0], line.prompt_ids
    if line.messages is not None:
        text = encoder.render(line.messages)
        token_ids = encoder.encode(text, add_special_tokens=False)  # the chat template wrote them
    else:
        text = line.prompt or ""
        token_ids = encoder.encode(text)
    if not token_ids:
        raise Invalid(f"prompt {text[:40]!r} has no tokens")
    return text, token_ids
