"""Ends of the two streams of a run."""

from __future__ import annotations

import msgspec


class Ends(msgspec.Struct, frozen=True, order=True):
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none.

    - `payload_key`: key of that group's payload, "" if unknown. It is random, so it identifies the history: an older
      Redis on which others went on has another group under the same number.
    - `incarnation`: how often runs of this name had been deleted before. A run that is restored after its deletion
      continues at older ends than the deleted one had.
    """

    entry: int
    group: int
    payload_key: str = ""
    incarnation: int = 0

    def __bool__(self) -> bool:
        return bool(self.entry or self.group)


NO_ENDS = Ends(0, 0)
