"""Imports slime once: each training is forked from the process that did. Importing takes 10 s on a busy machine."""

from __future__ import annotations

import contextlib

import slime_loop
from slime_source import NoSource, checkout, load

import replaybuf_slime

with contextlib.suppress(NoSource):
    load(checkout())

__all__ = ["replaybuf_slime", "slime_loop"]
