"""The store of one TransferQueue in Valkey or Redis.

A *piece* is what one put wrote of one sample: one immutable value under a key that is never used again, and a record of
where it belongs. All pieces of a sample go when the sample is cleared, but not before the last kept checkpoint that may
name them. Every change checks the session of its caller, and that the server holds all that the caller knows.

Keys, in one slot: `rbtq:{NAME}:state` hash (session, number of changes), `:records` hash, `:births` and `:deaths`
sorted sets (piece -> number of the change), `:at` hash (index -> pieces), `:checkpoints` hash, `:v:PIECE` string.
"""

from __future__ import annotations

import itertools
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from replaybuf.errors import DataLost, Fenced, NotDurable, ServiceUnavailable, UnsupportedServer
from replaybuf_transferqueue.settings import Settings

ORPHAN_TTL_S = 3600
"""How long a value stays that its put did not publish."""
CHUNK_BYTES = 8 << 20
CHUNK_PIECES = 512
_COMMAND_TIMEOUT_S = 30.0
_DISK_TIMEOUT_MS = 10_000
_AWAY = (redis.ConnectionError, redis.TimeoutError)
_T = TypeVar("_T")


class Piece(NamedTuple):
    """What one put writes of one sample; `sample` is TransferQueue's index."""

    id: str
    sample: int
    record: bytes
    value: bytes


class Range(NamedTuple):
    """Bytes of one value."""

    id: str
    offset: int
    length: int


class Store:
    """A connection to the store, for any number of threads.

    Every call waits up to `timeout_s` for a server that is away, and repeats what it does not know the outcome of:
    all calls are idempotent. Raises `ServiceUnavailable` after that, `Fenced` if a newer session took over, `DataLost`
    if the server came back without acknowledged changes, `NotDurable` if the disk did not confirm a change.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.session = settings.session
        self._known = 0
        self._prefix = f"rbtq:{{{settings.name}}}:"
        self._keys = [self._prefix + name for name in ("state", "records", "births", "deaths", "at", "checkpoints")]
        self._writer = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._redis = redis.Redis.from_url(
            settings.address,
            socket_timeout=_COMMAND_TIMEOUT_S,
            socket_connect_timeout=5.0,
            retry=Retry(NoBackoff(), 0),
            legacy_responses=False,
        )
        self._waits = self._repeat(self._prepare)

    def open(self) -> tuple[int, int]:
        """Begin a session, which fences all older ones; return its number and how many pieces the store holds."""
        self.session, self._known, pieces = self._repeat(
            lambda: self._redis.fcall("rbtq1_open", len(self._keys), *self._keys)
        )
        return self.session, pieces

    def close(self) -> None:
        """Close all connections."""
        self._redis.close()

    def new_id(self) -> str:
        """Return an id that no piece ever had."""
        return f"{self._writer}.{next(self._numbers)}"

    def put(self, pieces: Sequence[Piece]) -> None:
        """Store pieces; returns when they are durable. A failed put may have stored some of them."""
        for chunk in _chunks(pieces, lambda piece: len(piece.value)):
            self._repeat(lambda chunk=chunk: self._put_once(chunk))  # type: ignore[misc]

    def read(self, ranges: Sequence[Range]) -> list[memoryview | None]:
        """Read ranges, in order; None for those that the store does not hold."""
        values: dict[Range, memoryview] = {}
        for chunk in _chunks(_merged(ranges), lambda merged: merged.length):
            for merged, value in zip(chunk, self._repeat(lambda chunk=chunk: self._read_once(chunk)), strict=True):  # type: ignore[misc]
                values[merged] = memoryview(value)
        spans = sorted(values)
        return [_slice(values, spans, wanted) for wanted in ranges]

    def lengths(self, ids: Sequence[str]) -> list[int]:
        """Return the length of each value; 0 = it is not there."""

        def ask(chunk: Sequence[str]) -> list[int]:
            with self._redis.pipeline(transaction=False) as pipe:
                for piece in chunk:
                    pipe.strlen(f"{self._prefix}v:{piece}")
                return list(pipe.execute())

        return [length for chunk in _chunks(ids) for length in self._repeat(lambda c=chunk: ask(c))]  # type: ignore[misc]

    def records(self) -> dict[str, bytes]:
        """Return the record of every piece, dead ones too."""
        return {key.decode(): value for key, value in self._scan("hscan_iter", self._keys[1])}

    def deaths(self) -> set[str]:
        """Return the pieces whose samples are cleared."""
        return {key.decode() for key, _ in self._scan("zscan_iter", self._keys[3])}

    def at(self) -> dict[int, list[str]]:
        """Return the pieces of each index, oldest first."""
        return {int(index): ids.decode().split() for index, ids in self._scan("hscan_iter", self._keys[4])}

    def checkpoints(self) -> list[str]:
        """Return the names of the kept checkpoints."""
        checkpoints = self._scan("hscan_iter", self._keys[5])
        return [name.decode() for name, range_ in checkpoints if not range_.endswith(b" ")]

    def clear(self, indexes: Iterable[int]) -> None:
        """Clear samples: their values go now, or when no kept checkpoint may name them."""
        for chunk in _chunks(indexes):
            self._change("clear", *chunk)

    def retire(self, ids: Iterable[str]) -> None:
        """Clear pieces that belong to no sample of the controller."""
        for chunk in _chunks(ids):
            self._change("retire", *chunk)

    def adopt(self, pieces: Iterable[tuple[str, int]]) -> None:
        """Replace at once what is noted of indexes: these pieces belong to these, and no others to any."""
        chunks = list(_chunks(pieces)) or [[]]
        for number, chunk in enumerate(chunks, 1):
            self._change("adopt", int(number == 1), int(number == len(chunks)), *itertools.chain.from_iterable(chunk))

    def begin_checkpoint(self, name: str) -> None:
        """Keep every piece that lives now or later, until the checkpoint is finished."""
        self._change("begin", name)

    def finish_checkpoint(self, name: str) -> None:
        """Keep what the checkpoint may name, forget the oldest checkpoints, and delete what no kept one names."""
        self._change("finish", name, self.settings.keep_checkpoints)
        after: bytes | int = 0
        while after != b"":
            after = self._change("collect", after, CHUNK_PIECES)

    def _prepare(self) -> bool:
        """Load the functions; return whether a write has to wait for the disk. Raises if it cannot be durable."""
        try:
            code = resources.files(__package__).joinpath("library.lua").read_text()
            self._redis.function_load(code, replace=True)
            version = str(self._redis.info("server")["redis_version"]).split(".")
        except redis.ResponseError as error:
            message = f"the server refused functions ({error}); Redis 7.0 or Valkey 8 is needed"
            raise UnsupportedServer(message, name="url") from error
        try:
            config = {_text(name): _text(value) for name, value in self._redis.config_get("append*").items()}
        except redis.ResponseError:
            config = {}
        if self.settings.durability == "relaxed":
            return False
        if config.get("appendonly", "yes") == "yes" and config.get("appendfsync") != "no":
            if [int(part) for part in version[:2]] >= [7, 2]:  # the first with WAITAOF
                return True
            if config.get("appendfsync") == "always":
                return False
        raise NotDurable(
            f"appendonly is {config.get('appendonly')}, appendfsync is {config.get('appendfsync')}: a killed server "
            "loses acknowledged values; set appendonly yes and appendfsync always, or durability: relaxed",
            name="durability",
            value=config.get("appendfsync"),
            bound="always",
        )

    def _put_once(self, pieces: Sequence[Piece]) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for piece in pieces:
                # NX: a repeat must not put a TTL on a value that is published.
                pipe.set(f"{self._prefix}v:{piece.id}", piece.value, ex=ORPHAN_TTL_S, nx=True)
            args = itertools.chain.from_iterable((piece.id, piece.sample, piece.record) for piece in pieces)
            self._call(pipe, "publish", *args)
            replies = pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, redis.OutOfMemoryError):
                raise ServiceUnavailable(f"the server has no room: {reply}", name="maxmemory") from reply
            if isinstance(reply, Exception):
                raise reply
        try:
            self._check(replies[len(pieces) :])
        except (DataLost, Fenced):
            new_keys = [
                f"{self._prefix}v:{piece.id}" for piece, was_new in zip(pieces, replies, strict=False) if was_new
            ]
            if new_keys:  # of this attempt, which was not published; what an earlier attempt wrote has a TTL
                self._redis.unlink(*new_keys)
            raise

    def _read_once(self, ranges: Sequence[Range]) -> list[bytes]:
        with self._redis.pipeline(transaction=False) as pipe:
            for id_, offset, length in ranges:
                pipe.getrange(f"{self._prefix}v:{id_}", offset, offset + length - 1)
            return list(pipe.execute())

    def _change(self, function: str, *args: Any) -> Any:
        def once() -> Any:
            with self._redis.pipeline(transaction=False) as pipe:
                self._call(pipe, function, *args)
                return self._check(pipe.execute())

        return self._repeat(once)

    def _call(self, pipe: Any, function: str, *args: Any) -> None:
        pipe.fcall(f"rbtq1_{function}", len(self._keys), *self._keys, self.session, self._known, *args)
        if self._waits:
            pipe.execute_command("WAITAOF", 1, 0, _DISK_TIMEOUT_MS)

    def _check(self, replies: Sequence[Any]) -> Any:
        """Return the detail of a function's answer, after its outcome and its durability are checked."""
        outcome, session, changes, *detail = replies[0]
        if outcome == b"fenced":
            raise Fenced(
                f"this process belongs to session {self.session}; session {session} took over the store "
                f"{self.settings.name!r}: stop this process",
                name="session",
                value=self.session,
                bound=session,
            )
        if outcome == b"lost":
            raise DataLost(
                f"the store {self.settings.name!r} holds {changes} changes of session {session}; this process knows "
                f"{self._known} of session {self.session}: the server lost acknowledged data. Nothing is written to it",
                name="changes",
                value=changes,
                bound=self._known,
            )
        if self._waits and replies[1][0] < 1:
            raise NotDurable(f"the disk did not confirm a write within {_DISK_TIMEOUT_MS} ms", name="durability")
        self._known = max(self._known, changes)
        return detail[0] if detail else None

    def _scan(self, method: str, key: str) -> list[tuple[bytes, bytes]]:
        return self._repeat(lambda: list(getattr(self._redis, method)(key, count=CHUNK_PIECES)))

    def _repeat(self, attempt: Callable[[], _T]) -> _T:
        give_up_s = time.monotonic() + self.settings.timeout_s
        pause_s = 0.05
        while True:
            try:
                return attempt()
            except redis.ResponseError as error:
                if "Function not found" not in str(error):
                    raise
                # An emptied server has no functions either; the function finds out what else is lost.
                self._prepare()
            except _AWAY as error:
                if time.monotonic() + pause_s > give_up_s:
                    raise ServiceUnavailable(
                        f"the server of the store {self.settings.name!r} did not answer for "
                        f"{self.settings.timeout_s:g} s: {error}",
                        name="timeout_s",
                        value=self.settings.timeout_s,
                    ) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)


def _chunks(items: Iterable[_T], size: Callable[[_T], int] = lambda _: 0) -> Iterator[list[_T]]:
    """Cut into lists of at most `CHUNK_PIECES` items and about `CHUNK_BYTES` bytes."""
    chunk: list[_T] = []
    total = 0
    for item in items:
        if chunk and (len(chunk) == CHUNK_PIECES or total + size(item) > CHUNK_BYTES):
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size(item)
    if chunk:
        yield chunk


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """Join ranges of one value that touch, so that one command reads the fields of a sample."""
    last: Range | None = None
    for wanted in sorted(set(ranges)):
        if last and last.id == wanted.id and wanted.offset <= last.offset + last.length:
            end = max(last.offset + last.length, wanted.offset + wanted.length)
            last = Range(last.id, last.offset, end - last.offset)
        else:
            if last:
                yield last
            last = wanted
    if last:
        yield last


def _slice(values: dict[Range, memoryview], spans: list[Range], wanted: Range) -> memoryview | None:
    span = spans[bisect_right(spans, (wanted.id, wanted.offset, 1 << 62)) - 1]
    start = wanted.offset - span.offset
    value = values[span]
    return value[start : start + wanted.length] if len(value) >= start + wanted.length else None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
