"""Ends of the two streams of a run."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Ends(msgspec.Struct, frozen=True, order=True):
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none.

    - `payload_key`: key of that group's payload, "" if unknown. It is random, so it identifies the history: an older
      Redis on which others went on has another group under the same number.
    - `incarnation`: how often runs of this name had been deleted before, or a loss accepted. The run then continues at
      older ends than were known.
    """

    entry: int
    group: int
    payload_key: str = ""
    incarnation: int = 0

    def __bool__(self) -> bool:
        return bool(self.entry or self.group)


NO_ENDS = Ends(0, 0)


class Loss(NamedTuple):
    """A Redis whose streams end at `found`, before what is `known`."""

    found: Ends
    known: Ends

    @property
    def entries(self) -> int:
        """Ledger entries that are missing."""
        return max(0, self.known.entry - self.found.entry)

    @property
    def groups(self) -> int:
        """Groups that are missing; one of them may be there as another group under its number."""
        return max(0, self.known.group - self.found.group)
