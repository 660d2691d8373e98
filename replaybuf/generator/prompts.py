"""The prompts of a run: a JSON-lines file, in an order that tickets alone decide.

A ticket's `prompt_index` counts on over the epochs: epoch = prompt_index // len, and within an epoch the place in that
epoch's order. The order depends on nothing but (seed, epoch), so any number of generators, restarted at any time,
generate the same prompt for the same ticket.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from replaybuf.errors import Invalid
from replaybuf.group import Int32s

_EPOCHS_KEPT = 4
"""Orders of this many epochs are kept: tickets of neighbouring epochs are out at the same time."""


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a prompts file. Exactly one of `prompt`, `messages`, `prompt_ids` is given."""

    prompt_id: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    answer: str | int | float | None = None
    metadata: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One task instance: `text` is what the model sees, `token_ids` int32 [P] the same as tokens.

    `line` is its line in the prompts file, counted from 1.
    """

    prompt_id: str
    text: str
    token_ids: Int32s
    answer: str | None
    metadata: dict[str, Any]
    line: int


class Encoder(Protocol):
    """What is needed of a tokenizer to read prompts; `replaybuf.generator.tokenizer.Tokenizer` is one."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to token ids."""

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Decode sequences of token ids."""

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Render chat messages to text."""


class Prompts:
    """The prompts of a file, by prompt index. `shuffle=False` keeps the order of the file in every epoch."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        self._prompts = tuple(prompts)
        self._seed = seed % (1 << 64)
        self._shuffle = shuffle
        self._order = functools.lru_cache(maxsize=_EPOCHS_KEPT)(self._new_order)

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def at(self, prompt_index: int) -> Prompt:
        """Return the prompt of a ticket; `prompt_index` >= 0 counts on over the epochs."""
        epoch, place = divmod(prompt_index, len(self))
        return self._prompts[int(self._order(epoch)[place])]

    def _new_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self))
        # Sorting raw counter output, not Generator.permutation: numpy may change what the latter draws in any release.
        keys = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(len(self))
        return np.argsort(keys, kind="stable")


def read_prompts(file: Path, encoder: Encoder) -> list[Prompt]:
    """Read a prompts file. Raises `Invalid` naming file and line for whatever could not become a prompt.

    Without `prompt_id` a prompt is called `<file stem>/<line>`; ids are unique.
    """
    prompts: dict[str, Prompt] = {}
    for number, line in _lines(file):
        try:
            text, token_ids = _text_and_ids(line, encoder)
        except Invalid as error:
            raise _refused(file, number, error.detail) from None
        prompt = Prompt(
            prompt_id=line.prompt_id or f"{file.stem}/{number}",
            text=text,
            token_ids=np.array(token_ids, np.int32),
            answer=None if line.answer is None else str(line.answer),
            metadata=line.metadata,
            line=number,
        )
        if prompt.prompt_id in prompts:
            first = prompts[prompt.prompt_id].line
            raise _refused(file, number, f"prompt_id {prompt.prompt_id!r} stands already in line {first}")
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise Invalid(f"prompts file {file} holds no prompt", name="prompts", value=str(file), bound="at least 1 line")
    return list(prompts.values())


def _lines(file: Path) -> Iterator[tuple[int, PromptLine]]:
    """Yield every line that is not blank with its number, counted from 1."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, _decode(file, number, line)
    except OSError as error:
        raise Invalid(f"prompts file {file}: {error.strerror}", name="prompts", value=str(file)) from error


def _decode(file: Path, number: int, line: bytes) -> PromptLine:
    try:
        decoded = msgspec.json.decode(line, type=PromptLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refused(file, number, str(error)) from error
    forms = ("prompt", "messages", "prompt_ids")
    given = [name for name in forms if getattr(decoded, name) is not None]
    if len(given) != 1:
        raise _refused(
            file, number, f"has {' and '.join(given) or 'none'} of {', '.join(forms)}; exactly one is needed"
        )
    if not getattr(decoded, given[0]):
        raise _refused(file, number, f"{given[0]} is empty")
    return decoded


def _text_and_ids(line: PromptLine, encoder: Encoder) -> tuple[str, list[int]]:
    if line.prompt_ids is not None:
        low, high = min(line.prompt_ids), max(line.prompt_ids)
        if low < 0 or high >= encoder.vocab_size:
            raise Invalid(f"prompt_ids from {low} to {high}; the tokenizer has ids from 0 to {encoder.vocab_size - 1}")
        return encoder.decode([line.prompt_ids])[0], line.prompt_ids
    if line.messages is not None:
        text = encoder.render(line.messages)
        token_ids = encoder.encode(text, add_special_tokens=False)  # the chat template wrote them itself
    else:
        text = line.prompt or ""
        token_ids = encoder.encode(text)
    if not token_ids:
        raise Invalid(f"prompt {text[:40]!r} has no tokens")
    return text, token_ids


def _refused(file: Path, number: int, what: str) -> Invalid:
    return Invalid(f"prompts file {file}, line {number}: {what}", name="prompts", value=number)
