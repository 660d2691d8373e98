"""Checkpoint folders of transformers that are complete and on disk."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from replaybuf.files import STATE_BYTES, read_bounded

_NAME = re.compile(r"checkpoint-(\d+)")
STATE = "trainer_state.json"
"""transformers writes this file last."""


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint below `output_dir`, or None.

    A trainer that was killed while it saved leaves a part of one behind, which
    `transformers.trainer_utils.get_last_checkpoint` would return.
    """
    candidates = Path(output_dir).glob("checkpoint-*")
    folders = {int(name[1]): folder for folder in candidates if (name := _NAME.fullmatch(folder.name))}
    for step in sorted(folders, reverse=True):
        if step_of(folders[step]) == step:
            return str(folders[step])
    return None


def step_of(checkpoint: str | os.PathLike[str]) -> int | None:
    """Return the number of steps done in a checkpoint, None if it is not complete."""
    try:
        return int(json.loads(read_bounded(Path(checkpoint) / STATE, STATE_BYTES))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
