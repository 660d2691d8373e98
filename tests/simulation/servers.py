"""Simulated servers: the real service on the modelled Redis, its starts and ends, and calls of clients to it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect

from replaybuf.errors import NotLeader, ReplaybufError, ServiceUnavailable
from replaybuf.service.clock import Clock
from replaybuf.service.host import Service
from replaybuf.store import Store
from replaybuf.store.redis.connection import Connection
from tests.chaos.calling import Outcome
from tests.chaos.history import OK
from tests.simulation.http.client import CALL_TIMEOUT_S, RETRY_FOR_S
from tests.simulation.http.server import HttpServer
from tests.simulation.loop import NODE, WORLD, Node
from tests.simulation.redis_model.redis import Redis
from tests.simulation.world import World

P = ParamSpec("P")
T = TypeVar("T")

COMMAND_TIMEOUT_S = 3.0
RESTART_S = 0.3
SHORTEST_STOP_S, LONGEST_STOP_S = 0.5, 7.0
STOPPED_APPENDS = 0.01
"""Share of appends on a cluster whose server is stopped between the two steps."""
STOPPED_HANDOVERS = 0.3
"""Share of handovers whose server is stopped right before it sends: often another one leads when it goes on."""
PAUSE_S = 0.2

Gone = Callable[[], Any]
Work = Callable[[Service, Gone], Awaitable[T]]
"""What a handler does: calls the service; `Gone` ends with the client's connection."""


class Server:
    """One server that is started again whenever it ends. `node` is its present process."""

    def __init__(self, world: World, redis: Redis, name: str, folder: Path, history_groups: int) -> None:
        self.world, self.name = world, name
        self.url = f"http://{name}:8900"
        world.network[name, 8900] = self
        self.service: Service | None = None
        self.http: HttpServer | None = None
        self.wall_ahead_s = 0.0
        self.crashes: list[str] = []
        self.stops_at = ""
        """Run whose published counts it reads next, and is stopped then."""
        self._redis, self._folder, self._history_groups = redis, folder, history_groups
        self._starts = 0
        self._calls: dict[asyncio.Future[Any], None] = {}
        self._handled: dict[asyncio.Event, None] = {}
        self._stopping: asyncio.Event | None = None
        self.start()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start a process."""
        self._starts += 1
        self.node = Node(f"{self.name}.{self._starts}")
        self.node.wall_ahead_s = self.wall_ahead_s
        self._handled = {}
        self.world.note("starts", node=self.node)
        self.world.on(self.node, self.world.loop.create_task, self._serve())

    async def _serve(self) -> None:
        ended = "stopped in order"
        try:
            await self._run_service()
        except ServiceUnavailable as error:
            ended = f"ended: {error.detail}"  # as `serve` does when Redis cannot be reached at the start
        except Exception as error:  # noqa: BLE001 - whatever ends a server is a violation
            ended = f"ended with an error: {_flat(error)}"
            self.crashes.append(f"{self.world.now_s():.3f} {self.node} {ended}")
        self._end(ended)

    async def _run_service(self) -> None:
        """Do what `replaybuf.service.lifespan.run_service` does for a shared Redis."""
        mix = self.world.mix
        connection = Connection(self._redis.url, self._redis.policy, command_timeout_s=COMMAND_TIMEOUT_S)
        await connection.check_role()
        await connection.prepare()
        store = Store(connection)
        store.runs.hand_over = self._stopping_before(store.runs.hand_over)  # type: ignore[method-assign]
        if buckets := store.groups.buckets:
            read: Any = self._stopping_after_read(buckets._read_published)
            buckets._read_published = read  # type: ignore[method-assign]
            buckets.write = self._stopping_after(buckets.write)  # type: ignore[method-assign]
        connection.known.load(self._folder)
        clock = Clock(self.world.wall_s, self.world.now_s)
        service = Service(store, url=self.url, embedded=False, history_groups=self._history_groups, clock=clock)
        await service.start()
        self._stopping = asyncio.Event()
        try:
            async with service.working():
                self.service = service
                self.http = http = HttpServer(self.world, service, self.name, self.crashes) if mix.http else None
                await self._stopping.wait()
                if http:
                    await http.stop()
        finally:
            self.service = None
            await service.stop()
        await store.close()

    def kill(self) -> None:
        """End the process at once."""
        if not self.node.dead:
            self._end("killed")

    def stop(self) -> None:
        """End the process in order."""
        if self._stopping:
            self._stopping.set()

    def _end(self, how: str) -> None:
        node, world = self.node, self.world
        world.note(how, node=node)
        node.dead, self.service, self._stopping = True, None, None
        if self.http:
            self.http.reset()
            self.http = None
        for call in list(self._calls):
            world.at(WORLD, world.now_s() + world.way_s(), _fail, call, "the connection was reset")
        self._calls.clear()
        world.at(WORLD, world.now_s() + world.rng.uniform(0.0, RESTART_S), self.start)

    @property
    def unsettled(self) -> bool:
        """Whether it stands still, or handles a call whose client has left, or any by HTTP."""
        handles = any(left.is_set() for left in self._handled) or bool(self.http and self.http.busy)
        return handles or self.node.stopped

    @property
    def leads(self) -> list[str]:
        """Names of runs that this server believes to lead."""
        return [run.name for run in self.service.runs.values() if run.journal.leading] if self.service else []

    def hand_over(self, successor: Server) -> None:
        """Hand over what this server believes to lead, as to a server that has become steady."""
        if self.service and successor.service:
            for name in self.leads:
                work = self._hand_over(self.service, name, successor.service)
                self.world.on(self.node, self.world.loop.create_task, work)

    async def _hand_over(self, service: Service, name: str, successor: Service) -> None:
        run = service.runs[name]
        with contextlib.suppress(ReplaybufError):  # as background work, which is tried again
            await service._work(run, lambda: service._leadership.hand_over(run, successor._servers.holder))

    def _stopping_before(self, send: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Stop the process before a call to Redis, at times."""

        async def stopping(*arguments: P.args, **options: P.kwargs) -> T:
            await self._stop_at_times("stop in a handover", STOPPED_HANDOVERS)
            return await send(*arguments, **options)

        return stopping

    def _stopping_after(self, send: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Stop the process between the two steps of an append on a cluster, at times."""

        async def stopping(*arguments: P.args, **options: P.kwargs) -> T:
            done = await send(*arguments, **options)
            await self._stop_at_times("stop in an append", STOPPED_APPENDS)
            return done

        return stopping

    def _stopping_after_read(self, read: Callable[[str], Awaitable[T]]) -> Callable[[str], Coroutine[Any, Any, T]]:
        """Stop the process between reading what is published of a run and what it does then, at times or as asked."""

        async def stopping(run: str) -> T:
            published = await read(run)
            if self.stops_at == run:
                self.stops_at, NODE.get().stopped = "", True
                await asyncio.sleep(0)
            await self._stop_at_times("stop before a write", STOPPED_APPENDS)
            return published

        return stopping

    async def _stop_at_times(self, kind: str, rate: float) -> None:
        world, node = self.world, NODE.get()
        if world.may_hurt(node) and world.faults.happens(kind, rate, world):
            node.stopped = True
            world.at(WORLD, world.now_s() + world.rng.uniform(SHORTEST_STOP_S, LONGEST_STOP_S), world.loop.go_on, node)
            await asyncio.sleep(0)

    # ------------------------------------------------------------------ calls

    async def call(self, work: Work[T], wait_s: float = 0.0) -> T:
        """Call the server over the network. Raises `ServiceUnavailable` without an answer in time."""
        world = self.world
        answer: asyncio.Future[T] = world.loop.create_future()
        left = asyncio.Event()
        if world.faults.happens("lost call", world.faults.lost_call, world):
            world.note(f"a request to {self.name} is lost")
        elif self.service is None or (self._stopping and self._stopping.is_set()):  # one that ends listens no more
            world.at(WORLD, world.now_s() + world.way_s(), _fail, answer, "connection refused")
        else:
            self._calls[answer] = None
            world.at(self.node, world.now_s() + world.way_s(), self._take, work, answer, left)
        try:
            async with asyncio.timeout(wait_s + CALL_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise ServiceUnavailable(f"{self.url} did not answer in time", name="url", value=self.url) from None
        finally:
            self._calls.pop(answer, None)
            world.at(self.node, world.now_s() + world.way_s(), left.set)

    def _take(self, work: Work[T], answer: asyncio.Future[T], left: asyncio.Event) -> None:
        self.world.loop.create_task(self._handle(work, answer, left))

    async def _handle(self, work: Work[T], answer: asyncio.Future[T], left: asyncio.Event) -> None:
        async def gone() -> NoReturn:
            await left.wait()
            raise ClientDisconnect

        world, service = self.world, self.service
        if service is None:
            return
        settle: tuple[Callable[..., None], Any]
        self._handled[left] = None
        try:
            settle = _succeed, await work(service, gone)
        except ClientDisconnect:
            return
        except ReplaybufError as error:
            settle = _raise, error
        except Exception as error:  # noqa: BLE001 - as above
            self.crashes.append(f"{world.now_s():.3f} {self.node} a call ended with {_flat(error)}")
            settle = _raise, ReplaybufError(f"internal error: {error!r}")
        finally:
            self._handled.pop(left, None)
        if world.faults.happens("lost call", world.faults.lost_call, world):
            world.note("an answer is lost")
            return
        call, value = settle
        world.at(WORLD, world.now_s() + world.way_s(), call, answer, value)


def _succeed(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _raise(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _fail(answer: asyncio.Future[Any], why: str) -> None:
    _raise(answer, ServiceUnavailable(why, name="url"))


def _flat(error: BaseException) -> str:
    """Name an error, and each error of a group."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_flat(part) for part in error.exceptions)
    trace, where = error.__traceback__, ""
    while trace:
        where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{error!r} at {where}"


class Client:
    """Calls servers as the client library does: follows the leader, asks the other server, and retries for a while."""

    def __init__(self, servers: list[Server], node: Node) -> None:
        self.servers, self.node = servers, node
        self._world = servers[0].world
        self.server = self._world.rng.choice(servers)

    def ask_any(self) -> None:
        """Ask any of the servers next, not the one that led."""
        self.server = self._world.rng.choice(self.servers)

    async def observe(self, run: str, work: Work[T], wait_s: float = 0.0, *, only: Server | None = None) -> Outcome[T]:
        """Make a call; return its result, both times, the server and the outcome. `only`: ask this server once."""
        world = self._world
        sent_s, outcome, detail, result = world.now_s(), OK, "", None
        try:
            result = await (only.call(work, wait_s) if only else self._retry(work, wait_s))
        except ReplaybufError as error:
            outcome, detail = error.slug, error.detail
        server = (only or self.server).url
        seen = {"run": run, "sent_s": sent_s, "at_s": world.now_s(), "server": server, "outcome": outcome}
        return Outcome(seen | {"detail": detail}, result)

    async def _retry(self, work: Work[T], wait_s: float) -> T:
        world, ends_s = self._world, self._world.now_s() + RETRY_FOR_S
        while True:
            try:
                return await self.server.call(work, wait_s)
            except ServiceUnavailable as error:
                if world.now_s() > ends_s:
                    raise
                led_by = error.value if isinstance(error, NotLeader) else None
                self.server = next((one for one in self.servers if one.url == led_by), world.rng.choice(self.servers))
            await asyncio.sleep(world.rng.uniform(0.0, PAUSE_S))


@contextlib.contextmanager
def folders(count: int) -> Iterator[list[Path]]:
    """Make a folder for each server, in memory where there is such a file system."""
    memory = Path("/dev/shm")
    parent = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory if memory.is_dir() else None))
    try:
        yield [parent / str(number) for number in range(count)]
    finally:
        shutil.rmtree(parent)
