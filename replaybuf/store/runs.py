"""Names of runs, the lease on each run with its fencing token, and marks of deleted runs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import RedisError, ResponseError

from replaybuf.errors import Gone, Unreadable
from replaybuf.store import keys
from replaybuf.store.buckets import BucketStore
from replaybuf.store.known_ends import Ends, Loss, read_known
from replaybuf.store.redis.connection import Connection, text
from replaybuf.store.redis.faults import unavailable
from replaybuf.store.redis.pipeline import FastPipeline
from replaybuf.store.tickets import WHOLE
from replaybuf.wire.config import RUN_NAME

logger = logging.getLogger(__name__)

DELETING = "deleting"
"""First part of the mark of a run that still has keys. The rest is random: a restored run may be deleted again."""
RESTORING = "restoring"
"""First part of the mark of a run whose restore keeps its payloads. Without its lease the run is deleted."""
LEASES_AT_ONCE = 200
KEPT_CHUNKS = 64
"""Leases that one call renews: it blocks Redis for about 0.5 ms."""
MOST_STRANGE = 100
"""Strange names that are logged, once each."""
LONGEST_SHOWN = 80
NAME_TAKEN_S = 86400
"""How long the name of a deleted run is not free: clients that still use it must not reach another run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who leads a run: `token` is our fencing token, or None if `holder` leads for another `left_s` seconds.

    With a token, `entries` and `stored` are the newest ledger entry and group: no older leader adds to them.
    """

    token: str | None
    holder: str
    left_s: float
    entries: int = 0
    stored: int = 0


class HeldLease(NamedTuple):
    """Who leads a run, for how long, and how far its streams reach.

    `holder` is "" if the lease is free or cannot be read: `take_lease` takes it, or raises what is wrong.
    """

    holder: str
    left_s: float
    entries: int
    stored: int

    @staticmethod
    def expect(holder: str, entries: int, stored: int) -> str:
        """Describe a lease that `hold_leases` need not read."""
        return f"{entries} {stored} {holder}"


class RunStore:
    """Lists and adds runs; takes and releases their leases."""

    def __init__(self, connection: Connection, buckets: BucketStore | None = None) -> None:
        self._connection = connection
        self._buckets = buckets
        self._serving: dict[str, str] = {}
        self._strange: set[bytes] = set()
        self._listed: tuple[set[bytes], list[str]] = set(), []

    @property
    def serving(self) -> str:
        """Name the process of Redis that answered `hold_leases` last, in its role then; on a cluster, of each node."""
        return " ".join(name for _, name in sorted(self._serving.items()))

    async def list_names(self) -> list[str]:
        """List the names of all runs. Log and leave out what is not the name of a run."""
        raw = await self._connection.run(self._connection.client.smembers(keys.RUNS))
        if raw != self._listed[0]:  # asked once a second, and seldom another list
            self._listed = raw, self._check_names(raw)
        return [*self._listed[1]]

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
        pipe.execute_command(*self._connection.words_of(run, "rb_lead", [keys.lead(run)], arguments))
        (reply,) = await self._connection.run_each(pipe)
        if isinstance(reply, ResponseError):
            raise self._connection.explain(reply)
        outcome, detail = reply[0], reply[1]
        if text(outcome) in ("older", "replaced"):  # nobody leads with such a state; the check of the ends reports it
            return Lease(None, "", ttl_s)
        if detail[0] == 1:
            return Lease(text(detail[1]), holder, ttl_s, int(detail[2]), int(detail[3]))
        return Lease(None, text(detail[1]), int(detail[2]) / 1000)

    async def hold_leases(
        self, runs: Sequence[str], holder: str, ttl_s: float, expected: Sequence[str]
    ) -> list[HeldLease | float | None]:
        """Renew those leases on these runs that `holder` has, and read the others, in one round trip.

        `expected`: what `HeldLease.expect` returns, or "" to read the lease. A number = it is as expected, for at least
        so many seconds. None = the node of the run is away, while others of its cluster answer.
        """
        pipe, cluster = self._connection.pipeline(), self._connection.cluster
        at_once = 1 if cluster else LEASES_AT_ONCE  # a function has the keys of one slot
        starts = range(0, len(runs), at_once)
        ttl_ms = int(ttl_s * 1000)
        for start in starts:
            chunk = runs[start : start + at_once]
            names = _lease_keys(tuple(chunk))
            words = (*names, holder, ttl_ms, *expected[start : start + at_once])
            pipe.execute_command("FCALL", "rb_hold", len(names), *words)
        held: list[HeldLease | float | None] = []
        for start, reply in zip(starts, await self._connection.run_each(pipe), strict=True):
            chunk = runs[start : start + at_once]
            if isinstance(reply, (RedisError, OSError)):
                held += [None] * len(chunk)
                continue
            serving, least_ms, *changed = reply
            self._serving[cluster.owner_name(keys.lead(chunk[0])) if cluster else ""] = text(serving)
            held += [least_ms / 1000] * len(chunk)
            fields = [iter(changed)] * 5
            for place, name, left_ms, *ends in zip(*fields, strict=True):
                held[start + place] = HeldLease(text(name), left_ms / 1000, *ends)
        return held

    async def hand_over(self, run: str, token: str, successor: str, ttl_s: float) -> bool:
        """Give the lead to another holder, which alone can take it for `ttl_s`; `token` is then fenced.

        Returns False, and changes nothing, while nobody may take the lead. Raises `NotLeader` for an old token.
        """
        arguments = [successor, int(ttl_s * 1000)]
        outcome, _ = await self._connection.call(run, "rb_hand_over", [keys.lead(run)], arguments, token)
        return outcome == "ok"

    async def release_lease(self, run: str, holder: str) -> None:
        """Release the lease if `holder` has it."""
        await self._connection.run(
            self._connection.client.execute_command("FCALL", "rb_resign", 1, keys.lead(run), holder)
        )

    # ------------------------------------------------------------------ lost data

    async def read_loss(self, run: str) -> Loss | None:
        """Return what Redis lacks of what any server is known to know; None if it holds everything.

        Raises `ServiceUnavailable` where another server has accepted a loss and not brought that to its end.
        """
        pipe = self._connection.pipeline()
        pipe.execute_command(*self._connection.words_of(run, "rb_ends"))
        (reply,) = await self._connection.run_each(pipe)
        if isinstance(reply, ResponseError):
            raise self._connection.explain(reply)
        if text(reply[0]) == "replaced":  # another server has accepted it, or deleted the run
            if self._buckets and await self._buckets.count_missing(run):
                raise unavailable(self._connection.url, f"holds run {run} anew, which is read again; send it again")
            return None
        if text(reply[0]) != "older":
            return await self._read_bucket_loss(self._buckets, run, reply) if self._buckets else None
        return Loss(Ends(int(reply[1]), int(reply[2]), "", int(reply[3])), read_known(reply))

    async def _read_bucket_loss(self, buckets: BucketStore, run: str, reply: Sequence[Any]) -> Loss | None:
        """Return the loss of payloads as one of so many groups."""
        (entry, group, _), incarnation = reply[1], int(reply[2])
        missing = await buckets.count_missing(run)
        ends = Ends(int(entry), int(group), "", incarnation)
        return Loss(ends, msgspec.structs.replace(ends, group=ends.group + missing)) if missing else None

    async def accept_loss(self, run: str, loss: Loss, record: bytes) -> bool:
        """Let a run go on from what Redis holds, durably, with a ledger record of it. Every server reads the run again.

        Returns False, and changes nothing, if Redis holds something else than `loss` says, or a server knows more.
        """
        shown, known = loss
        names = [*keys.guarded(run), keys.lead(run)]
        arguments = [shown.entry, shown.group, known.incarnation, known.entry, known.group, record, keys.new_entry()]
        incarnation = await self._connection.write_one("FCALL", "rb_accept_loss", len(names), *names, *arguments)
        if incarnation:
            self._connection.known.begin(run, int(incarnation))
        if incarnation and self._buckets:
            await self._buckets.accept_loss(run)
        return bool(incarnation)

    # ------------------------------------------------------------------ deleted runs

    async def exists(self, run: str) -> bool:
        """Return whether a run is listed, or was known; forget what is known of an older run of this name.

        Raises `Gone` if it was deleted less than a day ago, `Unreadable` for a strange number of deletions.
        """
        pipe = self._connection.pipeline()
        pipe.sismember(keys.RUNS, run)
        pipe.ttl(keys.deleted(run))
        _add_mark(pipe, run)
        listed, left_s, mark, incarnation = await self._connection.run(pipe.execute())
        self._connection.known.begin(run, read_incarnation(run, incarnation))
        if self._is_in_force(run, mark, incarnation):
            self._connection.known.forget(run)
            free = "is being deleted" if left_s < 0 else f"was deleted; its name is free in {left_s / 3600:.1f} hours"
            raise Gone(f"run {run} {free}; use another name", name="run", value=run)
        return bool(listed) or bool(self._connection.known.of(run))

    async def is_deleted(self, run: str) -> bool:
        """Return whether a run was deleted less than a day ago."""
        pipe = self._connection.pipeline()
        _add_mark(pipe, run)
        return self._is_in_force(run, *await self._connection.run(pipe.execute()))

    def _is_in_force(self, run: str, mark: bytes | None, incarnation: bytes | None) -> bool:
        """Return whether there is a mark, and not only in an older Redis: of a run before the one that is known.

        A run has the incarnation of the last deletion before it. Its own deletion ends with another one.
        """
        known = self._connection.known.of(run)
        if mark is None or not known:
            return mark is not None
        first = known.incarnation + (not mark.startswith(DELETING.encode()))
        return read_incarnation(run, incarnation) >= first

    async def mark_deleted(self, run: str, token: str) -> None:
        """Record durably that a run is to be deleted. Raises `NotLeader`."""
        # First the list of work, which may name a run without a mark: a run with a mark must not be forgotten.
        await self._connection.run(self._connection.client.sadd(keys.DELETING, run))
        mark = _new_mark()
        await self._connection.call(run, "rb_delete", [keys.deleted(run)], [mark], token, durably=True)

    async def read_deletions(self) -> dict[str, str]:
        """Read the marks of deleted runs that still have keys, by name. A mark names one deletion of a run.

        Marks of an older Redis are left out: what it holds may be all that is left of the run that was restored since.
        A restore that was killed after it kept payloads is a deletion from the end of its lease on.
        """
        names = self._check_names(await self._connection.run(self._connection.client.smembers(keys.DELETING)))
        pipe = self._connection.pipeline()
        for name in names:  # not MGET: their keys may be on several servers
            _add_mark(pipe, name)
        replies = await self._connection.run(pipe.execute())
        pairs = zip(names, replies[::2], replies[1::2], strict=True)
        marks = {name: text(mark) for name, mark, count in pairs if self._is_in_force(name, mark, count)}
        if self._connection.cluster:
            await self._forget_names([name for name, mark in marks.items() if mark == "deleted"])
        for name, mark in marks.items():
            if mark.startswith(RESTORING) and await self._abandon(name, mark, deletion := _new_mark()):
                marks[name] = deletion
        return {name: mark for name, mark in marks.items() if mark.startswith(DELETING)}

    async def _abandon(self, run: str, mark: str, deletion: str) -> bool:
        return await self._change("rb_abandon", [keys.deleted(run), keys.lead(run)], [mark, deletion])

    async def erase(self, run: str, mark: str, names: Sequence[str]) -> bool:
        """Delete keys of a deleted run. Returns False, and deletes nothing, if its mark has changed."""
        if self._buckets is None:
            return await self._change("rb_erase", [keys.deleted(run), *names], [mark])
        # Between the two another server may finish the deletion, but no run gets the same payload keys: a cluster takes
        # no restored runs.
        marked = await self._change("rb_erase", [keys.deleted(run)], [mark])
        if marked and self._buckets:
            await self._buckets.unlink(names, durably=True)
        return marked

    async def erase_last(self, run: str, mark: str, adapters: Iterable[str]) -> bool:
        """Delete the keys of a deleted run except its payloads, and start the day after which its name is free.

        Returns False, and deletes nothing, if its mark has changed.
        """
        lists = (keys.RUNS, keys.DELETING)
        if self._connection.cluster:  # other slots: the names go after the mark, and again by `read_deletions`
            lists = (keys.no_names(run), keys.no_names(run))
        names = [keys.deleted(run), *lists, keys.incarnation(run), *keys.all_of(run, adapters)]
        erased = await self._change("rb_erase_last", names, [mark, run, NAME_TAKEN_S])
        if erased and self._connection.cluster:
            await self._forget_names([run])
        return erased

    async def _forget_names(self, runs: Sequence[str]) -> None:
        """Remove deleted runs of a cluster from the list of all runs, then from the list of work."""
        for key in (keys.RUNS, keys.DELETING) if runs else ():
            await self._connection.write_one("SREM", key, *runs)

    async def _change(self, function: str, names: Sequence[str], arguments: Sequence[str | int]) -> bool:
        return bool(await self._connection.write_one("FCALL", function, len(names), *names, *arguments))


@functools.lru_cache(maxsize=KEPT_CHUNKS)
def _lease_keys(runs: tuple[str, ...]) -> tuple[str, ...]:
    """List the keys of the leases of runs: once a second the same, as long as no run comes or goes."""
    return tuple(key for run in runs for key in (keys.lead(run), keys.counts(run), keys.fence(run)))


def read_incarnation(run: str, raw: bytes | None) -> int:
    """Decode how often runs of this name were deleted. Raises `Unreadable`."""
    if raw is None:
        return 0
    if not WHOLE.fullmatch(raw) or int(raw) < 0:
        raise Unreadable(f"the number of deletions of run {run} is {raw[:40]!r}", name="run", value=run)
    return int(raw)


def _add_mark(pipe: FastPipeline, run: str) -> None:
    """Read the mark of a run and then its incarnation: the end of a deletion changes both, so neither is too old."""
    pipe.get(keys.deleted(run))
    pipe.get(keys.incarnation(run))


def _new_mark() -> str:
    return f"{DELETING}:{secrets.token_hex(8)}"
