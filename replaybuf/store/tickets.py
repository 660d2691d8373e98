"""Tickets by deadline, and the counters of a run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from replaybuf.errors import ServiceUnavailable, Unreadable
from replaybuf.store import keys
from replaybuf.store.redis.connection import Connection, text
from replaybuf.store.redis.pipeline import FastPipeline

WHOLE = re.compile(rb"-?[0-9]{1,18}")
"""A counter, as Redis writes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunTickets:
    """The counters of a run, and its outstanding tickets with the seconds left; None = it is to be issued again."""

    counts: dict[str, int]
    tickets: list[tuple[str, float | None]]


class TicketStore:
    """Reads and changes tickets."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self, runs: Sequence[str]) -> list[RunTickets | Unreadable | ServiceUnavailable]:
        """Read counters and tickets of each of these runs, or what is wrong with them, in one round trip.

        `ServiceUnavailable`: the node of the run is away, while others of its cluster answer.
        """
        pipe = self._connection.pipeline()
        for run in runs:
            pipe.hgetall(keys.counts(run))
            _add_read(pipe, run)
        replies = await self._connection.run_each(pipe)
        return list(map(self._read_book, runs, replies[::2], replies[1::2]))

    def _read_book(self, run: str, counts: Any, tickets: Any) -> RunTickets | Unreadable | ServiceUnavailable:
        for reply in (counts, tickets):
            if isinstance(reply, (RedisError, OSError)):
                error = self._connection.explain(reply)
                if isinstance(error, ServiceUnavailable):
                    return error
                return Unreadable(error.detail, name="run", value=run)
        try:
            return _read_tickets(counts, tickets)
        except Unreadable as error:
            return error

    async def read_one(self, run: str) -> RunTickets:
        """Read counters and tickets of a run to decide with them. Raises `DataLost` if Redis is older than known."""
        pipe = self._connection.pipeline()
        pipe.hgetall(keys.counts(run))
        _add_read(pipe, run)
        return _read_tickets(*await self._connection.read(run, pipe))

    async def change(
        self,
        run: str,
        token: str,
        *,
        drop: Sequence[str] = (),
        left_s: Mapping[str, float] | None = None,
        counts: Mapping[str, int] | None = None,
        durably: bool = True,
    ) -> None:
        """Drop tickets, set the seconds left of others and raise counters, all or nothing. Raises `NotLeader`.

        0 seconds: the ticket is to be issued again. Pass `durably=False` if a restart finds a lost change by itself.
        """
        left = [part for ticket, ticket_s in (left_s or {}).items() for part in (math.ceil(ticket_s * 1000), ticket)]
        arguments = [len(drop), *drop, len(left) // 2, *left, *_flat(counts or {})]
        await self._connection.call(run, "rb_tickets", [keys.tickets(run)], arguments, token, durably=durably)


class CounterStore:
    """Reads and raises the counters of a run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(self, run: str) -> dict[str, int]:
        """Read all counters."""
        return _integers(await self._connection.run(self._connection.client.hgetall(keys.counts(run))))

    async def read_each(self, runs: Sequence[str]) -> list[dict[str, int]]:
        """Read the counters of each of these runs in one round trip; none of a run whose counters cannot be read."""
        pipe = self._connection.pipeline()
        for run in runs:
            pipe.hgetall(keys.counts(run))
        replies = await self._connection.run_each(pipe) if runs else []
        return [_integers(reply) if isinstance(reply, dict) else {} for reply in replies]

    async def add(self, run: str, increments: Mapping[str, int], token: str = "") -> None:
        """Raise counters. With a leader's fencing token raises `NotLeader` after a newer leader took over."""
        await self._connection.call(run, "rb_count", [keys.deleted(run)], _flat(increments), token)


def _add_read(pipe: FastPipeline, run: str) -> None:
    pipe.execute_command("FCALL", "rb_read_tickets", 1, keys.tickets(run))


def _read_tickets(counts: Any, reply: Any) -> RunTickets:
    now_ms, flat = reply
    tickets: list[tuple[str, float | None]] = []
    for ticket, deadline_ms in zip(map(text, flat[::2]), map(float, flat[1::2]), strict=True):
        if not math.isfinite(deadline_ms):
            detail = f"the deadline of ticket {ticket[:80]!r} is {deadline_ms}; a time is needed"
            raise Unreadable(detail, name="tickets")
        tickets.append((ticket, (deadline_ms - int(now_ms)) / 1000 if deadline_ms else None))
    return RunTickets(_integers(counts), tickets)


def _flat(counts: Mapping[str, int]) -> list[str | int]:
    return [part for pair in counts.items() for part in pair]


def _integers(raw: Any) -> dict[str, int]:
    for name, value in raw.items():
        if not WHOLE.fullmatch(value):
            shown = f"the counter {name[:80]!r} is {value[:40]!r}; a whole number of at most 18 digits is needed"
            raise Unreadable(shown, name="counts")
    return {text(name): int(value) for name, value in raw.items()}
