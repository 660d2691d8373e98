"""Ends of the two streams of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec


class Ends(msgspec.Struct, frozen=True, order=True):
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none.

    - `payload_key`: key of that group's payload, "" if unknown. It is random, so it identifies the history: an older
      Redis on which others went on has another group under the same number.
    - `entry_key`: that ledger entry's key, "" if unknown. It is random for the same reason.
    - `incarnation`: how often runs of this name had been deleted before, or a loss accepted. The run then continues at
      older ends than were known.
    """

    entry: int
    group: int
    payload_key: str = ""
    incarnation: int = 0
    entry_key: str = ""

    def __bool__(self) -> bool:
        return bool(self.entry or self.group)


NO_ENDS = Ends(0, 0)


def read_known(reply: Sequence[Any]) -> Ends:
    """Return the ends that are known, from the reply `older` of a function."""
    entry, group, payload_key, incarnation, entry_key = reply[4:9]
    return Ends(int(entry), int(group), payload_key.decode(errors="replace"), int(incarnation), entry_key.decode())


class Loss(NamedTuple):
    """A Redis whose streams end at `shown`, before what is `known`."""

    shown: Ends
    known: Ends

    @property
    def entries(self) -> int:
        """Ledger entries that are missing."""
        return max(0, self.known.entry - self.shown.entry)

    @property
    def groups(self) -> int:
        """Groups that are missing; one of them may be there as another group under its number."""
        return max(0, self.known.group - self.shown.group)
