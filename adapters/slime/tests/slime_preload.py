"""Imports slime once: each training is forked from the process that did. Importing takes 10 s on a busy machine."""

from __future__ import annotations

import contextlib

import slime_loop
from slime_source import SOURCE, load

import replaybuf_slime
from tests.pinned_source import NoSource

with contextlib.suppress(NoSource):
    load(SOURCE.checkout())

__all__ = ["replaybuf_slime", "slime_loop"]
