"""One turn of a peer: insert groups in three ways and get them again. `benchmarks/peers.py` starts it.

    .venv-peers/reverb/bin/python benchmarks/peers/reverb_peer.py COLUMNS.npz GROUPS TOGETHER ANSWER.json

COLUMNS holds arrays of equal length, one row per distinct group. ANSWER gets the seconds of each phase and the versions
of the packages. Needs numpy only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

Columns = dict[str, np.ndarray[Any, Any]]
"""Columns of one group, or of several with a leading axis."""


class Peer(Protocol):
    """A running peer with an empty buffer."""

    packages: Sequence[str]

    def insert(self, groups: Sequence[Columns]) -> None:
        """Insert groups with one call."""

    def get(self, count: int) -> int:
        """Get a batch; return how many bytes its columns have."""


def main(start: Callable[[int], Peer]) -> None:
    """Read the command line and take the turn; `start` gets the number of groups of all phases."""
    columns_path, groups, together, answer = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    with np.load(columns_path) as loaded:
        stacked: Mapping[str, Any] = {name: loaded[name] for name in loaded.files}
    distinct = len(next(iter(stacked.values())))
    rows = [{name: values[row] for name, values in stacked.items()} for row in range(distinct)]
    peer = start(3 * groups)
    turn(peer, rows, max(together, groups // 4 // together * together), together)  # warms up
    seconds = turn(peer, rows, groups, together)
    answer.write_text(json.dumps({"seconds": seconds, "versions": {name: version(name) for name in peer.packages}}))


def turn(peer: Peer, rows: list[Columns], groups: int, together: int) -> dict[str, float]:
    """Insert `groups` in each of the three ways, then get all of them."""
    seconds = {}
    for phase, per_call, callers in (("alone", 1, 1), ("by eight", together, 1), ("eight callers", 1, together)):
        calls = list(_calls(rows, groups, per_call))
        begun_s = perf_counter()
        if callers == 1:
            for call in calls:
                peer.insert(call)
        else:
            with ThreadPoolExecutor(callers) as pool:
                list(pool.map(peer.insert, calls))
        seconds[phase] = perf_counter() - begun_s
    begun_s = perf_counter()
    read = sum(peer.get(together) for _ in range(3 * groups // together))
    seconds["get"] = (perf_counter() - begun_s) / 3
    wanted = 3 * sum(sum(values.nbytes for values in rows[n % len(rows)].values()) for n in range(groups))
    if read != wanted:
        raise RuntimeError(f"read {read} bytes of {wanted}")
    return seconds


def _calls(rows: list[Columns], groups: int, per_call: int) -> Iterator[list[Columns]]:
    for first in range(0, groups, per_call):
        yield [rows[number % len(rows)] for number in range(first, first + per_call)]
