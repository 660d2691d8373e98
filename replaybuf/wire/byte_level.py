"""Text of token ids where tokens are written as bytes (GPT-2, Llama 3, Qwen): by a table.

The decoder `ByteLevel` of `tokenizers` writes a byte as one character, so the text of a sequence is the bytes of its
tokens one after another, read as UTF-8. What of it is no character becomes U+FFFD, in both by the Unicode standard
(chapter 3, "U+FFFD Substitution of Maximal Subparts").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replaybuf.wire.group import TokenIds

if TYPE_CHECKING:
    import tokenizers

_PRINTED = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
"""Bytes that are written as the character of their number; the others, in order, as those from 256 on."""
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTED)))
}


def is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Say whether `ByteLevel` is all that the tokenizer decodes by."""
    from tokenizers import decoders

    return isinstance(tokenizer.decoder, decoders.ByteLevel)


class ByteLevel:
    """Decodes as a tokenizer does of which `is_byte_level` is true, with all ids below `vocab_size`; special tokens are
    left out.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        tokens = [tokenizer.id_to_token(token_id) for token_id in range(vocab_size)]
        # An array of objects: it is picked from by an array of ids, which need not become a list before.
        self._bytes = np.array(
            [b"" if token is None or token in special else _bytes_of(token) for token in tokens], object
        )

    def decode(self, token_ids: TokenIds) -> str:
        """Decode one sequence of ids >= 0; those that the tokenizer does not have stand for nothing."""
        ids = np.asarray(token_ids, np.int32)
        try:
            parts = self._bytes.take(ids)
        except IndexError:  # many models have more ids than their tokenizers
            parts = self._bytes.take(ids[ids < len(self._bytes)])
        return b"".join(parts.tolist()).decode("utf-8", "replace")


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:  # an added token, which stands for itself: a character of it stands for no byte
        return token.encode()
