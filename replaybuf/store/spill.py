"""Spilled frames: which groups have moved, as Redis knows it, and their files.

Order of a move: file written -> file and folder synced -> one function replaces the payload by a stub and records the
number. A crash before the function leaves a file that nothing names; `Spill` of the service deletes it once its group
is freed. A crash after it leaves a stub whose file is durable. The order of freeing: record -> files and payloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from replaybuf.errors import BrokenFrame, Invalid, MissingExtra, SpillAway, Unreadable
from replaybuf.store import keys
from replaybuf.store.redis.connection import Connection, text
from replaybuf.store.spill_folder import SpillFolder, open_folder
from replaybuf.store.tickets import WHOLE
from replaybuf.wire.spill import check_spill_url, encode_stub, is_folder_of, stub_path

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 4
"""Files of a run read at the same time, and as many written. A folder that hangs holds these threads only."""
FILES_TIMEOUT_S = 30.0
"""Longest time for one chunk of files; a mounted folder may hang for ever."""
_SCANNED = 5_000


class SpillFiles:
    """Files of one `spill.url`, in threads of their own. Any call may raise `SpillAway`; a wrong URL is `Invalid`.

    `reads` counts files, `failures` calls; `error` is that of the last call, None if it succeeded.
    """

    def __init__(self, url: str) -> None:
        self.url = check_spill_url(url)
        self.reads = 0
        self.failures = 0
        self.error: str | None = None
        self._folder: SpillFolder | None = None
        self._readers = ThreadPoolExecutor(THREADS, thread_name_prefix="spill-read")
        self._writers = ThreadPoolExecutor(THREADS, thread_name_prefix="spill-write")
        self._reading = asyncio.Semaphore(2)

    async def probe(self) -> None:
        """Write and delete a file."""
        await self._do(self._writers, [lambda: self._opened().probe()])

    async def check(self, folder: str) -> None:
        """Check that the folder of a run is there."""
        await self._do(self._readers, [lambda: self._opened().check(folder)])

    async def create(self, folder: str) -> None:
        """Create the folder of a run."""
        await self._do(self._writers, [lambda: self._opened().create(folder)])

    async def write(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write files; return when they are durable."""

        def write(part: Sequence[tuple[str, bytes]]) -> None:
            for path, data in part:
                self._opened().write(path, data)

        await self._do(self._writers, [functools.partial(write, part) for part in _split(files)])
        await self._do(self._writers, [lambda: self._opened().sync([path for path, _ in files])])

    async def read(self, paths: Sequence[str]) -> list[bytes | None]:
        """Read files; None = missing in a folder that is there."""

        def read(part: Sequence[str]) -> list[bytes | None]:
            return [self._opened().read(path) for path in part]

        async with self._limited(), self._reading:
            parts = await self._do(self._readers, [functools.partial(read, part) for part in _split(paths)])
        self.reads += len(paths)
        return [data for part in parts for data in part]

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete files, if they are there."""
        await self._do(self._writers, [lambda: self._opened().delete(paths)])

    async def delete_some(
        self,
        folder: str,
        choose: Callable[[Sequence[str]], Sequence[str]],
        confirm: Callable[[], Awaitable[None]],
    ) -> int:
        """Delete those files of a run's folder that `choose` returns, one subfolder at a time; return how many.

        `confirm` is asked before each deletion, and raises if nothing may be deleted any more.
        """
        (listed,) = await self._do(self._writers, [lambda: self._opened().list_paths(folder)])
        deleted = 0
        while True:
            (paths,) = await self._do(self._writers, [lambda: next(listed, None)])
            if paths is None:
                return deleted
            chosen = choose(paths)
            if chosen:
                await confirm()
                await self.delete(chosen)
            deleted += len(chosen)

    async def remove(self, folder: str) -> None:
        """Delete the folder of a run."""
        await self._do(self._writers, [lambda: self._opened().remove(folder)])

    def close(self) -> None:
        """Start nothing any more."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)

    def _opened(self) -> SpillFolder:
        if self._folder is None:  # in a thread: it may import the library of an object store
            self._folder = open_folder(self.url)
        return self._folder

    async def _do(self, threads: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> list[T]:
        loop = asyncio.get_running_loop()
        async with self._limited():
            return list(await asyncio.gather(*(loop.run_in_executor(threads, call) for call in calls)))

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Raise `SpillAway` if the body takes longer than `FILES_TIMEOUT_S`, or lacks a package."""
        try:
            async with asyncio.timeout(FILES_TIMEOUT_S):
                yield
        except (SpillAway, MissingExtra, TimeoutError) as error:
            self.failures += 1
            if not isinstance(error, SpillAway):
                slow = f"it did not answer within {FILES_TIMEOUT_S:g} s"
                detail = f"the spill folder {self.url} cannot be used: {error if str(error) else slow}"
                error = SpillAway(detail, name="spill.url", value=self.url)
            self.error = error.detail
            raise error from None
        self.error = None


class SpilledFrames:
    """Reads frames whose payload is a stub, for the runs that have a spill folder."""

    def __init__(self) -> None:
        self._files: dict[str, SpillFiles] = {}

    def open(self, run: str, url: str) -> SpillFiles:
        """Open the folder of a run."""
        files = self._files[run] = SpillFiles(url)
        return files

    def close(self, run: str, files: SpillFiles) -> None:
        """Close a folder of a run, and forget it unless the run was opened again."""
        files.close()
        if self._files.get(run) is files:
            del self._files[run]

    async def follow(self, run: str, payloads: list[bytes | None]) -> list[bytes | None]:
        """Return the payloads of a run with the frames in place of stubs; None = the file is missing.

        A stub that no spill wrote stays as it is, and then is a broken frame. Raises `SpillAway`.
        """
        files = self._files.get(run)
        paths = {n: path for n, payload in enumerate(payloads) if (path := _path_in(run, payload))} if files else {}
        if not files or not paths:
            return payloads
        frames = await files.read(list(paths.values()))
        followed = list(payloads)
        for position, frame in zip(paths, frames, strict=True):
            followed[position] = frame
        return followed


class Move(NamedTuple):
    """A payload key of group `number` that moves to the file `path`; `spilled_bytes` of the group are in files then."""

    key: str
    number: int
    path: str
    spilled_bytes: int


class SpillStore:
    """Records in Redis which groups have moved."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def check_supported(self) -> None:
        """Raise `Invalid` on a cluster: a frame and the record of its move may be on different nodes."""
        if self._connection.cluster:
            detail = f"spill cannot be used with a Redis Cluster ({self._connection.url}); add nodes or memory to it"
            raise Invalid(detail, name="spill")

    async def read_folder(self, run: str) -> tuple[str, str] | None:
        """Read URL and name of a run's folder; None before the first move.

        Raises `Unreadable` for a folder that is not of this run: its files would be read and deleted.
        """
        values = await self._connection.run(self._connection.client.hmget(keys.spill(run), ["url", "folder"]))
        if not all(values):
            return None
        url, folder = map(text, values)
        try:
            check_spill_url(url)
        except Invalid as error:
            raise Unreadable(f"{keys.spill(run)}: {error.detail}", name="spill.url", value=url) from error
        if not is_folder_of(run, folder):
            detail = f"{keys.spill(run)} names the spill folder {folder[:80]!r}, which is not one of run {run}"
            raise Unreadable(detail, name="spill", value=folder)
        return url, folder

    async def read_spilled(self, run: str) -> dict[int, int]:
        """Read the bytes in files by group, in pieces."""
        spilled: dict[int, int] = {}
        position = 0
        while True:
            scan: Any = self._connection.client.hscan(keys.spill(run), position, count=_SCANNED)
            position, fields = await self._connection.run(scan)
            pairs = [pair for pair in fields.items() if all(map(WHOLE.fullmatch, pair))]
            spilled |= {int(number): int(nbytes) for number, nbytes in pairs}
            if not position:
                return spilled

    async def find_spilled(self, run: str, numbers: Sequence[int]) -> list[int]:
        """Return those of these groups that are spilled."""
        spilled: list[int] = []
        for start in range(0, len(numbers), _SCANNED):
            piece = numbers[start : start + _SCANNED]
            replies = await self._connection.run(
                self._connection.client.hmget(keys.spill(run), [str(number) for number in piece])
            )
            spilled += [number for number, value in zip(piece, replies, strict=True) if value is not None]
        return spilled

    async def record(self, run: str, token: str, url: str, folder: str, moves: Sequence[Move] = ()) -> list[bool]:
        """Record the folder of a run, and replace payloads by stubs.

        The files must be durable. Returns False for payloads that are gone. Raises `NotLeader`, `DataLost`, and
        `SpillAway` if the run has another folder.
        """
        names = [keys.spill(run), *(move.key for move in moves)]
        moved = [part for move in moves for part in (move.number, encode_stub(move.path), move.spilled_bytes)]
        outcome, detail = await self._connection.call(
            run, "rb_spill", names, [url, folder, *moved], token, durably=True
        )
        if outcome == "other":
            raise SpillAway(f"the spilled frames of run {run} are in folder {text(detail)!r}, not in {folder!r}")
        return [bool(there) for there in detail] if moves else []

    async def forget(self, run: str, token: str, numbers: Sequence[int]) -> None:
        """Forget groups whose files are deleted, or are about to be. Raises `NotLeader`, `DataLost`."""
        for start in range(0, len(numbers), _SCANNED):
            await self._connection.call(run, "rb_forget", [keys.spill(run)], numbers[start : start + _SCANNED], token)

    async def remove_files(self, run: str, url: str, folder: str) -> None:
        """Delete the files of a deleted run. Log and leave them if their folder is not available."""
        files = SpillFiles(url)
        try:
            await files.remove(folder)
        except SpillAway as error:
            logger.error("files of deleted run %s stay in %s/%s: %s", run, url, folder, error.detail)
        finally:
            files.close()


def _path_in(run: str, payload: bytes | None) -> str | None:
    try:
        return stub_path(run, payload)
    except BrokenFrame:
        return None


def _split(items: Sequence[T]) -> list[Sequence[T]]:
    """Split items into at most `THREADS` parts."""
    size = -(-len(items) // THREADS) or 1
    return [items[start : start + size] for start in range(0, len(items), size)]
