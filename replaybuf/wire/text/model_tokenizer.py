"""The tokenizer of a Hugging Face model folder, with the `tokenizers` library only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.files import MODEL_FILE_BYTES, read_bounded
from replaybuf.wire.group import TokenIds

if TYPE_CHECKING:
    import tokenizers

EXTRA = "generate"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Text to token ids and back, as the model in `folder` was trained.

    Reads `tokenizer.json`, and if present `tokenizer_config.json`, `generation_config.json`, `chat_template.jinja` and
    `config.json`. `vocab_size` is the largest id + 1, `model_vocab_size` the model's, None if unknown. Raises `Invalid`
    if a file is missing or unreadable, `MissingExtra` without the library.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = _load(folder / "tokenizer.json")
        self._config = _read_json(folder / "tokenizer_config.json")
        # Not the number of tokens: vocabularies have gaps.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.model_vocab_size = _vocab_size(_read_json(folder / "config.json"))
        self.eos_token_ids = self._find_eos(_read_json(folder / "generation_config.json"))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence tokens, ascending."""
        return tuple(sorted(self.eos_token_ids))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to token ids; `add_special_tokens` applies the tokenizer's own rule for special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[TokenIds], *, special_tokens: bool = False) -> list[str]:
        """Decode sequences of token ids, with or without `special_tokens`."""
        # One by one: for the few sequences of a group the library's batching costs more than it saves.
        lists = [ids.tolist() if isinstance(ids, np.ndarray) else ids for ids in token_ids]
        return [self._tokenizer.decode(ids, skip_special_tokens=not special_tokens) for ids in lists]

    def split(self, token_ids: TokenIds) -> list[str]:
        """Return the text of each token; a token that is part of a character has U+FFFD."""
        known, places = np.unique(np.asarray(token_ids, np.int64), return_inverse=True)
        texts = self.decode([[token_id] for token_id in known.tolist()], special_tokens=True)
        return [texts[place] for place in places.tolist()]

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Render chat messages with the folder's template, up to the start of the assistant's answer.

        Raises `Invalid` if the folder has no template or it rejects the messages, `MissingExtra` without jinja2.
        """
        source = self._chat_template()
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise MissingExtra("a prompt with messages", EXTRA) from None
        # The options that templates of model folders expect.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _reject_messages
        names = {name: _token_text(self._config.get(name)) for name in _SPECIAL_TOKENS}
        try:
            template = environment.from_string(source)
            return template.render(messages=list(messages), add_generation_prompt=True, **names)
        except TemplateError as error:
            raise Invalid(f"chat template of {self.folder}: {error}", name="messages") from error

    def _chat_template(self) -> str:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return _read(file).decode(errors="replace")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several templates by name; "default" is for chat
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        if not isinstance(template, str):
            raise Invalid(
                f"a prompt has messages, but {self.folder} has no chat template; use prompt or prompt_ids",
                name="messages",
                value=str(self.folder),
                bound="chat_template.jinja, or chat_template in tokenizer_config.json",
            )
        return template

    def _find_eos(self, generation: dict[str, Any]) -> frozenset[int]:
        """Read the end-of-sequence ids of the generation configuration, else the tokenizer's own token."""
        eos = generation.get("eos_token_id")
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
        token = _token_text(self._config.get("eos_token"))
        token_id = self._tokenizer.token_to_id(token) if token else None
        return frozenset() if token_id is None else frozenset({token_id})


def _load(file: Path) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("a tokenizer", EXTRA) from None
    if not file.is_file():
        raise Invalid(f"tokenizer folder {file.parent} has no tokenizer.json", name="tokenizer", value=str(file.parent))
    content = _read(file)
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception for a broken file
        raise Invalid(f"{file} does not load: {error}", name="tokenizer", value=str(file)) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(_read(file), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"{file} does not decode: {error}", name="tokenizer", value=str(file)) from error


def _read(file: Path) -> bytes:
    try:
        return read_bounded(file, MODEL_FILE_BYTES)
    except OSError as error:
        raise Invalid(f"{file} cannot be read: {error}", name="tokenizer", value=str(file)) from error


def _vocab_size(config: dict[str, Any]) -> int | None:
    """Return the model's number of ids, for a multimodal model that of its text part; None if unknown."""
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _token_text(token: Any) -> str:
    """Return the text of a special token, which is a string or an object in the file."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _reject_messages(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
