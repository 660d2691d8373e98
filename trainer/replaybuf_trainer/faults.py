"""Errors of the trainer itself."""

from __future__ import annotations

from replaybuf.errors import ReplaybufError


class TrainingFault(ReplaybufError):
    """The training cannot go on: a non-finite loss, or a checkpoint that cannot be written."""
