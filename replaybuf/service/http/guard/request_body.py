"""The body of one request on its way from the parser to the handler, in the pieces that the parser cut."""

from __future__ import annotations

from typing import Self


class RequestBody:
    """Pieces that the handler has not received: uvicorn's `bytearray`, in the operations that uvicorn uses.

    A `bytearray` copies each piece, also when it grows, and once more for the handler: four of seven copies of a body.
    """

    def __init__(self) -> None:
        self._size_bytes = 0
        self._pieces: list[bytes] = []

    def __iadd__(self, piece: bytes) -> Self:
        self._size_bytes += len(piece)
        self._pieces.append(piece)
        return self

    def __len__(self) -> int:
        return self._size_bytes

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)  # a single piece is not copied
