"""Names of runs, the lease on each run with its fencing token, and marks of deleted runs."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from replaybuf.errors import Gone, Unreadable
from replaybuf.store import keys
from replaybuf.store.loss.ends import Ends, Loss, read_known
from replaybuf.store.redis.connection import Connection, text
from replaybuf.store.tickets import WHOLE
from replaybuf.wire.config import RUN_NAME

logger = logging.getLogger(__name__)

DELETING = "deleting"
"""First part of the mark of a run that still has keys. The rest is random: a restored run may be deleted again."""
RESTORING = "restoring"
"""First part of the mark of a run whose restore keeps its payloads. Without its lease the run is deleted."""
LEASES_AT_ONCE = 200
"""Leases that one call renews: it blocks Redis for about 0.5 ms."""
MOST_STRANGE = 100
"""Strange names that are logged, once each."""
LONGEST_SHOWN = 80
NAME_TAKEN_S = 86400
"""How long the name of a deleted run is not free: clients that still use it must not reach another run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who leads a run: `token` is our fencing token, or None if `holder` leads for another `left_s` seconds."""

    token: str | None
    holder: str
    left_s: float


class HeldLease(NamedTuple):
    """Who leads a run, for how long, and how far its streams reach.

    `holder` is "" if the lease is free or cannot be read: `take_lease` takes it, or raises what is wrong.
    """

    holder: str
    left_s: float
    entries: int
    stored: int


class RunStore:
    """Lists and adds runs; takes and releases their leases.

    `serving`: name of the process of Redis that answered `hold_leases` last, in its role then.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.serving = ""
        self._strange: set[bytes] = set()

    async def list_names(self) -> list[str]:
        """List the names of all runs. Log and leave out what is not the name of a run."""
        return self._check_names(await self._connection.run(self._connection.client.smembers(keys.RUNS)))

    def _check_names(self, raw: Iterable[bytes]) -> list[str]:
        shown = {name: name.decode(errors="replace") for name in raw}
        strange = {name for name, run in shown.items() if not RUN_NAME.fullmatch(run)}
        for name in sorted(strange - self._strange)[: MOST_STRANGE - len(self._strange)]:
            logger.warning("not the name of a run in Redis name=%r; it is left out", name[:LONGEST_SHOWN])
            self._strange.add(name)
        return sorted(shown[name] for name in shown.keys() - strange)

    async def add(self, run: str) -> None:
        """Add a name to the list of runs."""
        await self._connection.run(self._connection.client.sadd(keys.RUNS, run))

    async def take_lease(self, run: str, holder: str, ttl_s: float, *, force: bool = False) -> Lease:
        """Take or renew the lease on a run; `force` takes it from any holder, who is then fenced.

        Raises `Unreadable` for keys of another type.
        """
        pipe = self._connection.pipeline()
        arguments = [holder, int(ttl_s * 1000), "1" if force else "0"]
        self._connection.add_call(pipe, run, "rb_lead", [keys.lead(run)], arguments)
        (reply,) = await self._connection.run_each(pipe)
        if isinstance(reply, ResponseError):
            raise self._connection.explain(reply)
        outcome, detail = reply[0], reply[1]
        if text(outcome) in ("older", "replaced"):  # nobody leads with such a state; the check of the ends reports it
            return Lease(None, "", ttl_s)
        if detail[0] == 1:
            return Lease(text(detail[1]), holder, ttl_s)
        return Lease(None, text(detail[1]), int(detail[2]) / 1000)

    async def hold_leases(self, runs: Sequence[str], holder: str, ttl_s: float) -> list[HeldLease]:
        """Renew those leases on these runs that `holder` has, and read the others, in one round trip."""
        pipe = self._connection.pipeline()
        for start in range(0, len(runs), LEASES_AT_ONCE):
            names = [key for run in runs[start : start + LEASES_AT_ONCE] for key in (keys.lead(run), keys.counts(run))]
            pipe.execute_command("FCALL", "rb_hold", len(names), *names, holder, int(ttl_s * 1000))
        flat: list[Any] = []
        for serving, *answers in await self._connection.run(pipe.execute()):
            self.serving = text(serving)
            flat += answers
        return [
            HeldLease(text(name), left_ms / 1000, entries, stored)
            for name, left_ms, entries, stored in zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
        ]

    async def release_lease(self, run: str, holder: str) -> None:
        """Release the lease if `holder` has it."""
        pipe = self._connection.pipeline()
        pipe.fcall("rb_resign", 1, keys.lead(run), holder)
        await self._connection.run(pipe.execute())

    # ------------------------------------------------------------------ lost data

    async def read_loss(self, run: str) -> Loss | None:
        """Return what Redis lacks of what any server is known to know; None if it holds everything."""
        pipe = self._connection.pipeline()
        self._connection.add_call(pipe, run, "rb_ends")
        (reply,) = await self._connection.run_each(pipe)
        if isinstance(reply, ResponseError):
            raise self._connection.explain(reply)
        if text(reply[0]) != "older":
            return None
        return Loss(Ends(int(reply[1]), int(reply[2]), "", int(reply[3])), read_known(reply))

    async def accept_loss(self, run: str, loss: Loss, record: bytes) -> bool:
        """Let a run go on from what Redis holds, durably, with a ledger record of it. Every server reads the run again.

        Returns False, and changes nothing, if Redis holds something else than `loss` says, or a server knows more.
        """
        found, known = loss
        names = [*keys.guarded(run), keys.lead(run)]
        arguments = [found.entry, found.group, known.incarnation, known.entry, known.group, record, keys.new_entry()]
        pipe = self._connection.pipeline()
        pipe.fcall("rb_accept_loss", len(names), *names, *arguments)
        (incarnation,) = await self._connection.run_durably(pipe)
        if incarnation:
            self._connection.known.begin(run, int(incarnation))
        return bool(incarnation)

    # ------------------------------------------------------------------ deleted runs

    async def exists(self, run: str) -> bool:
        """Return whether a run is listed, or was known; forget what is known of an older run of this name.

        Raises `Gone` if it was deleted less than a day ago, `Unreadable` for a strange number of deletions.
        """
        pipe = self._connection.pipeline()
        pipe.sismember(keys.RUNS, run)
        pipe.ttl(keys.deleted(run))
        pipe.get(keys.incarnation(run))
        listed, left_s, incarnation = await self._connection.run(pipe.execute())
        self._connection.known.begin(run, read_incarnation(run, incarnation))
        if left_s != -2:
            self._connection.known.forget(run)
            free = "is being deleted" if left_s < 0 else f"was deleted; its name is free in {left_s / 3600:.1f} hours"
            raise Gone(f"run {run} {free}; use another name", name="run", value=run)
        return bool(listed) or bool(self._connection.known.of(run))

    async def is_deleted(self, run: str) -> bool:
        """Return whether a run was deleted less than a day ago."""
        return bool(await self._connection.run(self._connection.client.exists(keys.deleted(run))))

    async def mark_deleted(self, run: str, token: str) -> None:
        """Record durably that a run is to be deleted. Raises `NotLeader`."""
        # First the list of work, which may name a run without a mark: a run with a mark must not be forgotten.
        await self._connection.run(self._connection.client.sadd(keys.DELETING, run))
        mark = _new_mark()
        await self._connection.call(run, "rb_delete", [keys.deleted(run)], [mark], token, durably=True)

    async def read_deletions(self) -> dict[str, str]:
        """Read the marks of deleted runs that still have keys, by name. A mark names one deletion of a run.

        A restore that was killed after it kept payloads is a deletion from the end of its lease on.
        """
        names = self._check_names(await self._connection.run(self._connection.client.smembers(keys.DELETING)))
        found = await self._connection.run(self._connection.client.mget(map(keys.deleted, names))) if names else []
        marks = {name: text(mark) for name, mark in zip(names, found, strict=True) if mark is not None}
        for name, mark in marks.items():
            if mark.startswith(RESTORING) and await self._abandon(name, mark, deletion := _new_mark()):
                marks[name] = deletion
        return {name: mark for name, mark in marks.items() if mark.startswith(DELETING)}

    async def _abandon(self, run: str, mark: str, deletion: str) -> bool:
        pipe = self._connection.pipeline()
        pipe.fcall("rb_abandon", 2, keys.deleted(run), keys.lead(run), mark, deletion)
        (abandoned,) = await self._connection.run_durably(pipe)
        return bool(abandoned)

    async def erase(self, run: str, mark: str, names: Sequence[str]) -> bool:
        """Delete keys of a deleted run. Returns False, and deletes nothing, if its mark has changed."""
        return await self._erase("rb_erase", [keys.deleted(run), *names], [mark])

    async def erase_last(self, run: str, mark: str, adapters: Iterable[str]) -> bool:
        """Delete the keys of a deleted run except its payloads, and start the day after which its name is free.

        Returns False, and deletes nothing, if its mark has changed.
        """
        names = [keys.deleted(run), keys.RUNS, keys.DELETING, keys.incarnation(run), *keys.all_of(run, adapters)]
        return await self._erase("rb_erase_last", names, [mark, run, NAME_TAKEN_S])

    async def _erase(self, function: str, names: Sequence[str], arguments: Sequence[str | int]) -> bool:
        pipe = self._connection.pipeline()
        pipe.fcall(function, len(names), *names, *arguments)
        (erased,) = await self._connection.run_durably(pipe)
        return bool(erased)


def read_incarnation(run: str, raw: bytes | None) -> int:
    """Decode how often runs of this name were deleted. Raises `Unreadable`."""
    if raw is None:
        return 0
    if not WHOLE.fullmatch(raw) or int(raw) < 0:
        raise Unreadable(f"the number of deletions of run {run} is {raw[:40]!r}", name="run", value=run)
    return int(raw)


def _new_mark() -> str:
    return f"{DELETING}:{secrets.token_hex(8)}"
