"""Room under `limits.max_tokens_live` and `limits.max_bytes_live`, judged at the door, where sizes are known.

    live + coming <= bound, but for groups for want of which there is no next batch

without which nothing would ever leave the buffer. So what is live never exceeds a bound, or what one batch takes,
whichever is more. What has no room is told to come again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from replaybuf.errors import NoRoom
from replaybuf.wire.config import Limits


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What groups take; nothing by default."""

    groups: int = 0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.groups + other.groups, self.tokens + other.tokens, self.bytes + other.bytes)

    def __sub__(self, other: Load) -> Load:
        return Load(self.groups - other.groups, self.tokens - other.tokens, self.bytes - other.bytes)

    def over(self, limits: Limits) -> NoRoom | None:
        """Name the bound that this exceeds, its value and the bound's."""
        for name, value, bound in (
            ("max_tokens_live", self.tokens, limits.max_tokens_live),
            ("max_bytes_live", self.bytes, limits.max_bytes_live),
        ):
            if bound is not None and value > bound:
                what = "tokens" if name == "max_tokens_live" else "bytes"
                told = f"with the next group {value} {what} would be live; limits.{name} is {bound}"
                return NoRoom(told, name=f"limits.{name}", value=value, bound=bound)
        return None


def count_fitting(
    held: Load, coming: Sequence[Load], limits: Limits, lacking: Callable[[], int]
) -> tuple[int, NoRoom | None]:
    """Count the first groups of `coming` that may enter beside `held`; with the bound that stops the next one.

    A group that takes nothing always may. `lacking` says how many groups the next batch waits for; it is asked once,
    when a bound is met.
    """
    wanted: int | None = None
    entered = 0
    for position, load in enumerate(coming):
        if not load.groups:
            continue
        held += load
        if refusal := held.over(limits):
            wanted = lacking() if wanted is None else wanted
            if entered >= wanted:
                return position, refusal
        entered += 1
    return len(coming), None
