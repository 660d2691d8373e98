"""Which of several servers may lead runs, and which of them should lead one: rendezvous hashing.

Each server has a weight for each run, and the server with the largest weight is wanted. A server that joins takes over
only the runs for which its weight is the largest; the runs of a server that leaves are spread over all others. Source:
Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

KEPT = 8192
"""Answers that are kept: each server asks again and again for the same runs and servers."""


class Seniority(NamedTuple):
    """How long a server has lived; its name decides between equal ones. `release`: what it runs."""

    alive_s: float
    server: str
    release: str


def leading_release(servers: Iterable[Seniority]) -> str:
    """Return the release that leads runs while servers of several live: that of the server that has lived longest.

    A server of another release that joins must not write records that the others cannot read.
    """
    return max(servers).release


@functools.lru_cache(maxsize=KEPT)
def wanted_leader(run: str, servers: frozenset[str]) -> str | None:
    """Return the server that should lead a run; None without servers. Every caller gets the same answer."""
    return max(servers, key=functools.partial(_weigh, run), default=None)


def _weigh(run: str, server: str) -> tuple[bytes, str]:
    # No name of a run has a blank. The name of the server decides between equal weights.
    return hashlib.blake2b(f"{run} {server}".encode(), digest_size=8).digest(), server
