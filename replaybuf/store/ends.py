"""Ends of the two streams of a run."""

from __future__ import annotations

import msgspec


class Ends(msgspec.Struct, frozen=True, order=True):
    """Where the streams of a run end: number of the newest ledger entry and of the newest group; 0 = none.

    `payload_key`: key of that group's payload, "" if unknown. It is random, so it identifies the history: an older
    Redis on which others went on has another group under the same number.
    """

    entry: int
    group: int
    payload_key: str = ""


NO_ENDS = Ends(0, 0)
