"""Tickets by their deadline, and the counters of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replaybuf.store import keys
from replaybuf.store.connection import Connection, text


@dataclasses.dataclass(frozen=True, slots=True)
class Book:
    """The counters of a run, and its tickets that are out or to be issued again, with deadlines in s (0 = again)."""

    counts: dict[str, int]
    tickets: list[tuple[str, float]]


class TicketCommands(Connection):
    """What is done with tickets and counters: read, and changed all or nothing."""

    async def books(self, runs: Sequence[str]) -> list[Book]:
        """Read counters and tickets of each of these runs, in one round trip."""
        pipe = self._redis.pipeline(transaction=False)
        for run in runs:
            pipe.hgetall(keys.counts(run))
            pipe.zrange(keys.tickets(run), 0, -1, withscores=True)
        replies = await self._guard(pipe.execute())
        return [
            Book(_counts(counts), [(text(ticket), float(deadline) / 1000) for ticket, deadline in tickets])
            for counts, tickets in zip(replies[::2], replies[1::2], strict=True)
        ]

    async def change_tickets(
        self,
        run: str,
        token: str,
        *,
        drop: Sequence[str] = (),
        deadlines_s: Mapping[str, float] | None = None,
        counts: Mapping[str, int] | None = None,
        durably: bool = True,
    ) -> None:
        """Drop tickets, set the deadlines of others and raise counters, all or nothing. Raises `NotLeader`.

        `durably=False` where a restart finds out by itself what is lost.
        """
        put = [part for ticket, at_s in (deadlines_s or {}).items() for part in (int(at_s * 1000), ticket)]
        raised = [part for name, by in (counts or {}).items() for part in (name, by)]
        call = self._call_durably if durably else self._call
        reply = await call(
            "rb_tickets",
            [keys.tickets(run), keys.counts(run), keys.fence(run)],
            [token, len(drop), *drop, len(put) // 2, *put, *raised],
        )
        self._check_fence(run, token, reply)

    async def counts(self, run: str) -> dict[str, int]:
        """Read the run's counters."""
        return _counts(await self._guard(self._redis.hgetall(keys.counts(run))))

    async def count(self, run: str, raised: Mapping[str, int]) -> None:
        """Raise counters."""
        changes = [part for name, by in raised.items() for part in (name, by)]
        await self._call("rb_count", [keys.counts(run)], [len(raised), *changes])

    async def set_count(self, run: str, name: str, value: int) -> None:
        """Set a counter."""
        await self._call("rb_count", [keys.counts(run)], [0, name, value])


def _counts(raw: Any) -> dict[str, int]:
    return {text(name): int(value) for name, value in raw.items()}
