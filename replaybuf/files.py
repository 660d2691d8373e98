"""Files that somebody else may have written, each read with a bound; and files that readers see whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

CONFIG_BYTES = 1 << 20
"""TOML or JSON that a person writes, and small state files."""
TOKENS_BYTES = 16 << 20
"""A tokens file with 50,000 tokens of 300 bytes."""
STATE_BYTES = 1 << 26
"""State of a checkpoint. One of 4,096 ranks lists 8,192 files in 2 MB."""
MODEL_FILE_BYTES = 1 << 27
"""JSON in a model folder: tokenizers of 260,000 tokens have 33 MB, an index of 100,000 tensors 10 MB."""
RECORDING_BYTES = 1 << 30
"""A recording or manifest of a whole run: 3 million groups of 300 bytes."""
PROMPT_LINE_BYTES = 1 << 24
"""One line of a prompts file, which may have any number of them."""
_PIECE_BYTES = 1 << 16


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a file. Raises `OSError`, also for a file that is larger than `most_bytes`."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        check_size(path, size, most_bytes)
        content = file.read(size)
        while piece := file.read(_PIECE_BYTES):  # of a pipe, or of a file that grows
            content += piece
            check_size(path, len(content), most_bytes)
    return content


def write_whole(path: Path, content: bytes) -> None:
    """Write a file through to the disk that readers see whole or not at all. Raises `OSError`."""
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file or folder through to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_size(path: Path, size: int, most_bytes: int) -> None:
    """Raise `OSError` for a file that is larger than `most_bytes`."""
    if size > most_bytes:
        detail = f"it has {size} bytes; the maximum is {most_bytes}; check that this is the right file"
        raise OSError(errno.EFBIG, detail, str(path))
