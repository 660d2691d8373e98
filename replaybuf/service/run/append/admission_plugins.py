"""Asks the admission plug-ins of one run about groups, in a process of its own, one group at a time.

A plug-in may take seconds, hang, or end its process: the process is killed at the time limit, the group is rejected,
and the next group gets a new process. The event loop and other runs do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from replaybuf.errors import GroupRejected, NoRoom, ServiceUnavailable
from replaybuf.kernel.figures.histograms import Histogram
from replaybuf.service.child_processes import ChildProcess
from replaybuf.service.run.append.admission_process import Answer, Question
from replaybuf.service.run.append.group_check import LARGE_GROUP_BYTES
from replaybuf.service.run.journal import Journal
from replaybuf.service.shared_bytes import SharedBytes
from replaybuf.store import PendingGroup
from replaybuf.wire.config import AdmissionSpec
from replaybuf.wire.decoding import prepared

logger = logging.getLogger(__name__)

MODULE = "replaybuf.service.run.append.admission_process"
MOST_WAITING = 64
"""Requests that wait for the process at once. Each has one group in the queue."""
CHECKING_S = 15.0
"""After so long a request starts no further check: clients wait 30 s for an answer."""
START_LIMIT_S = 120.0
"""A plug-in may load a model when it is built."""
REMEMBERED_S = 60.0
MOST_REMEMBERED = 4096
"""A refusal is remembered for a producer that sends a request again that had no time for all of its groups."""
TOOK_US = tuple(round(1e6 * s) for s in (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300))
"""Upper edges of the buckets of check times, in microseconds."""
RETRY_S = 5.0
"""Plug-ins that could not be built are not built again sooner."""


class PluginTime:
    """Time that the plug-ins have for one request, from its first check on."""

    @functools.cached_property
    def until_s(self) -> float:
        """When the last check may begin, by the clock of the event loop."""
        return asyncio.get_running_loop().time() + CHECKING_S


class AdmissionPlugins:
    """The admission plug-ins of one run and their process, which starts with the first group.

        requests in the queue <= MOST_WAITING;      a group is asked about while `_turn` is held

    Configuration, lead and end of the run are compared at each check and each `tick`; the process follows.
    `deferred`: requests answered with 429.
    """

    def __init__(self, journal: Journal) -> None:
        self.deferred = 0
        self._took: dict[str, Histogram] = {}
        self._journal = journal
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: ChildProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._specs: Sequence[AdmissionSpec] = ()
        self._failure = ""
        self._failed_at_s = 0.0
        self._refused: OrderedDict[tuple[str, int], tuple[float, GroupRejected]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return self._waiting

    def check_times(self) -> Iterator[tuple[str, Histogram]]:
        """Yield check times by plug-in, in microseconds; those of the configuration too that checked nothing yet."""
        names = {spec.name for spec in self._journal.config.admissions} | self._took.keys()
        for name in sorted(names):
            yield name, self._took.get(name) or Histogram(TOOK_US)

    async def check(self, item: PendingGroup, specs: Sequence[AdmissionSpec], until_s: float) -> GroupRejected | None:
        """Return why the first plug-in that refuses a group does so; None = all admit it.

        Raises `NoRoom` if too many requests wait or the turn does not come until `until_s` of the event loop's clock,
        and `ServiceUnavailable` if the plug-ins cannot be built.
        """
        key, now_s = (item.group_id, item.crc32c), asyncio.get_running_loop().time()
        since_s, refusal = self._refused.get(key, (0.0, None))
        if refusal and specs == self._specs and now_s < since_s + REMEMBERED_S:
            return refusal
        try:
            if refusal := await self._check(item, specs, until_s):
                self._refused[key] = now_s, refusal
                if len(self._refused) > MOST_REMEMBERED:
                    self._refused.popitem(last=False)
            return refusal
        except NoRoom:
            self.deferred += 1
            raise
        finally:
            if self._journal.closed:
                self.close()

    async def _check(self, item: PendingGroup, specs: Sequence[AdmissionSpec], until_s: float) -> GroupRejected | None:
        if self._waiting >= MOST_WAITING:
            detail = f"{self._waiting} requests wait for the admission check of run {self._journal.name}; retry later"
            raise NoRoom(detail, name="admissions", value=self._waiting, bound=MOST_WAITING, retry_after_s=RETRY_S)
        self._waiting += 1
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(until_s):
                    await asyncio.sleep(0)  # a time that is over ends the wait even if there is nothing to wait for
                    await stack.enter_async_context(self._turn)
                    process = await self._started(specs)
            except TimeoutError:
                raise NoRoom(
                    f"the admission check of run {self._journal.name} did not begin within {CHECKING_S:g} s; retry "
                    "later. Groups of this request that were checked are stored",
                    name="admissions",
                    value=self._waiting,
                    bound=MOST_WAITING,
                    retry_after_s=RETRY_S,
                ) from None
            finally:
                self._waiting -= 1
            frame = await _file(item.frame)
            for place, spec in enumerate(specs):
                with self._timed(spec.name):
                    refusal = await self._ask(process, place, spec, item, frame)
                if refusal:
                    return refusal
        return None

    def tick(self) -> None:
        """End a process that is not needed: another server leads, the run is finished, or it has other plug-ins."""
        journal = self._journal
        if not journal.leading or journal.state.phase == "finished" or self._specs != journal.config.admissions:
            self.close()

    def close(self) -> None:
        """End the process, unless a group is being checked: then whoever waits for the check ends it."""
        if not self._turn.locked():
            self._end()

    def _end(self) -> None:
        if self._starting:
            self._starting.cancel()
        if self._process:
            self._process.end()
        self._process = self._starting = None

    async def _started(self, specs: Sequence[AdmissionSpec]) -> ChildProcess:
        """Return a process with these plug-ins. Raises `ServiceUnavailable` if they cannot be built."""
        loop = asyncio.get_running_loop()
        if self._specs != specs or not (self._starting or (self._process and self._process.running)):
            if self._specs == specs and self._failure and loop.time() < self._failed_at_s + RETRY_S:
                raise self._unavailable()
            self._end()
            if self._specs != specs:
                self._refused.clear()
            self._specs = specs
            self._starting = asyncio.create_task(self._start(specs))
        if self._starting:
            await asyncio.shield(self._starting)  # it goes on for the next request if this one does not wait so long
        if self._process is None:
            raise self._unavailable()
        return self._process

    async def _start(self, specs: Sequence[AdmissionSpec]) -> None:
        with contextlib.ExitStack() as stack:
            try:
                process = await asyncio.to_thread(ChildProcess, MODULE)
                stack.callback(process.end)
                file = await _file(msgspec.msgpack.encode(specs))
                question = msgspec.json.encode(Question(START_LIMIT_S))
                self._failure = _read(await process.ask(question, [file.fd], START_LIMIT_S)).detail
            except TimeoutError:
                self._failure = f"they were not built within {START_LIMIT_S:g} s"
            except OSError as error:
                self._failure = f"their process failed: {error}"
            self._starting = None
            if not self._failure:
                stack.pop_all()
                self._process = process
                return
        self._failed_at_s = asyncio.get_running_loop().time()
        logger.error("admission plug-ins failed run=%s: %s", self._journal.name, self._failure)

    def _unavailable(self) -> ServiceUnavailable:
        detail = (
            f"run {self._journal.name} takes no groups, because its admission plug-ins cannot be built: {self._failure}"
        )
        return ServiceUnavailable(detail, name="admissions", retry_after_s=RETRY_S)

    async def _ask(
        self, process: ChildProcess, place: int, spec: AdmissionSpec, item: PendingGroup, frame: SharedBytes
    ) -> GroupRejected | None:
        question = Question(spec.timeout_s, place, item.group_id, item.group.prompt_index)
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            try:
                answer = _read(await process.ask(msgspec.json.encode(question), [frame.fd], spec.timeout_s))
            except TimeoutError:
                detail = f"admission {spec.name!r} did not answer within {spec.timeout_s:g} s"
                rejection = GroupRejected("admission_timeout", detail, name="timeout_s", bound=spec.timeout_s)
            except OSError as error:
                rejection = GroupRejected("admission_fault", f"admission {spec.name!r}: {error} during its check")
            else:
                stack.pop_all()
                if not answer.fault:
                    return GroupRejected(answer.reason, answer.detail) if answer.reason else None
                rejection = GroupRejected("admission_fault", f"admission {spec.name!r}: {answer.detail}")
        logger.error("admission failed run=%s group=%s: %s", self._journal.name, item.group_id, rejection.detail)
        return rejection

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            took = self._took.setdefault(name, Histogram(TOOK_US))
            took.add_one(round(1e6 * (time.perf_counter() - began_s)))


def _read(reply: bytes) -> Answer:
    return msgspec.json.decode(reply, type=prepared(Answer))


async def _file(content: bytes | memoryview) -> SharedBytes:
    """Return a file with this content; a large one is written in a thread."""
    file = SharedBytes()
    if len(content) <= LARGE_GROUP_BYTES:
        file.append(content)
    else:
        await asyncio.to_thread(file.append, content)
    return file
