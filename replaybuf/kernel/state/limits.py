"""Limits on live groups (`max_tokens_live`, `max_bytes_live`) and on frames in Redis (`max_bytes_in_memory`).

They are checked at the append, where sizes are known.

::

    live + coming <= bound, except for groups that the next batch waits for

Without the exception nothing would ever leave the buffer. So live groups never exceed a bound, or one batch if that is
larger. Groups that do not fit are answered 429, and their producer sends them again.
"""

from __future__ import annotations

import operator

import msgspec
from msgspec.structs import astuple

from replaybuf.errors import NoRoom
from replaybuf.wire.config import Limits


class Load(msgspec.Struct, frozen=True):
    """Groups, tokens and bytes of some groups; `in_memory`: those of the bytes that are not spilled."""

    groups: int = 0
    tokens: int = 0
    bytes: int = 0
    in_memory: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Load) -> Load:
        return Load(*map(operator.sub, astuple(self), astuple(other)))

    def over(self, limits: Limits) -> NoRoom | None:
        """Return the error of the first limit that this load exceeds, None if it exceeds none."""
        for name, value, bound in (
            ("max_tokens_live", self.tokens, limits.max_tokens_live),
            ("max_bytes_live", self.bytes, limits.max_bytes_live),
            ("max_bytes_in_memory", self.in_memory, limits.max_bytes_in_memory),
        ):
            if bound is not None and value > bound:
                what = "tokens" if name == "max_tokens_live" else "bytes"
                where = "in memory" if name == "max_bytes_in_memory" else "live"
                detail = f"with the next group {value} {what} would be {where}; limits.{name} is {bound}"
                return NoRoom(detail, name=f"limits.{name}", value=value, bound=bound)
        return None
