"""Byte-level decoding, compared with the tokenizers library."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from replaybuf.wire.text.byte_level import ByteLevel, is_byte_level
from replaybuf.wire.text.model_tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""One token per byte; ids 0 to 255, but not in the order of the bytes."""
TOKENS = [*ALPHABET, "Ġhello", "æĹ¥", "âĤ", "ĊĊ", "<|twice|>"]
SPECIAL = ["<|im_end|>", "<｜end▁of▁sentence｜>", "Ġword", "<|twice|>"]
ADDED = ["<tool_call>", "<｜not▁special｜>", "two words", "Ġ é"]
ABSENT = 3
"""Ids of the model after the last id of its tokenizer."""


@functools.cache
def library() -> tokenizers.Tokenizer:
    """Build a byte-level tokenizer with words, special tokens and added tokens."""
    made = tokenizers.Tokenizer(models.WordLevel({token: n for n, token in enumerate(TOKENS)}, unk_token=ALPHABET[0]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(token, special=False) for token in ADDED])
    return made


@functools.cache
def table() -> ByteLevel:
    """Build the table of the same tokenizer."""
    return ByteLevel(library(), library().get_vocab_size())


IDS = st.integers(0, len({*TOKENS, *SPECIAL, *ADDED}) - 1 + ABSENT)


@given(st.lists(IDS, max_size=24))
def test_any_token_ids_decode_like_the_library(token_ids: list[int]) -> None:
    assert table().decode(token_ids) == library().decode(token_ids, skip_special_tokens=True)


BEYOND_ASCII = st.sampled_from([token_id for token_id, token in enumerate(ALPHABET) if ord(token) > 0x7F])


@given(st.lists(BEYOND_ASCII, max_size=12))
def test_invalid_utf8_decodes_like_the_library(token_ids: list[int]) -> None:
    """Nearly all of these sequences are cut off, too long or out of range."""
    assert table().decode(token_ids) == library().decode(token_ids, skip_special_tokens=True)


def test_a_byte_level_model_folder_decodes_like_the_library(tmp_path: Path) -> None:
    library().save(str(tmp_path / "tokenizer.json"))
    sequences = [[*range(0, 260, 3), 1000], [], [261, 263, 5]]
    assert Tokenizer(tmp_path).decode(sequences) == [library().decode(ids) for ids in sequences]


@pytest.mark.parametrize("decoder", [decoders.Fuse(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])])
def test_other_decoders_are_not_byte_level(decoder: decoders.Decoder) -> None:
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.decoder = decoder
    assert not is_byte_level(made)
