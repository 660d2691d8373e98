"""Set of prompts as bitmaps, so that it stays small in a long run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np


class PromptSet:
    """Prompts by adapter and index, with one bit per index up to the highest: 10 million indexes take 1.25 MB."""

    def __init__(self, bits: Mapping[str, bytes] | None = None) -> None:
        self._bits = {adapter: bytearray(raw) for adapter, raw in (bits or {}).items()}
        self._count = sum(int.from_bytes(raw, "little").bit_count() for raw in self._bits.values())

    @property
    def bits(self) -> dict[str, bytes]:
        """Return the bitmaps without trailing zero bytes; index `i` is bit `i % 8` of byte `i // 8`."""
        return {adapter: bytes(kept) for adapter, raw in self._bits.items() if (kept := raw.rstrip(b"\0"))}

    def add(self, adapter: str, index: int) -> None:
        """Add a prompt."""
        if (adapter, index) not in self:
            bits = self._bits.setdefault(adapter, bytearray())
            bits.extend(bytes(max(0, index // 8 + 1 - len(bits))))
            bits[index // 8] |= 1 << index % 8
            self._count += 1

    def discard(self, adapter: str, index: int) -> None:
        """Remove a prompt if it is in the set."""
        if (adapter, index) in self:
            self._bits[adapter][index // 8] &= ~(1 << index % 8)
            self._count -= 1

    def __contains__(self, prompt: tuple[str, int]) -> bool:
        adapter, index = prompt
        bits = self._bits.get(adapter, b"")
        return 0 <= index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for adapter, raw in self._bits.items():
            positions = np.flatnonzero(np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little"))
            yield from ((adapter, index) for index in positions.tolist())

    def __eq__(self, other: object) -> bool:
        return self.bits == other.bits if isinstance(other, PromptSet) else NotImplemented
