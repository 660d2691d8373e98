"""Errors of the trainer itself, and of the helper that downloads weights."""

from __future__ import annotations

from replaybuf.errors import ReplaybufError


class TrainingFault(ReplaybufError):
    """The training cannot go on: a non-finite loss, or a checkpoint that cannot be written."""


class WrongDigest(ReplaybufError):
    """Bytes arrived that are not those of the manifest, again and again."""

    status = 502


class DiskFault(ReplaybufError):
    """The disk of the helper does not take the weights."""

    status = 507


class EngineAway(ReplaybufError):
    """The engine beside a helper does not answer."""

    status = 502


class Superseded(ReplaybufError):
    """A newer version is wanted before this one was complete."""

    status = 409
