"""Several processes that serve together on one machine: `replaybuf serve --workers N`.

The first process opens the listening sockets and starts the embedded Valkey; each worker is a server of its own that
accepts from the same sockets. A worker also listens on a port of its own, `--port` + its number, where the others hand
it the calls for runs that it leads, and where Prometheus finds its metrics. One that ends is started again; its runs
are led by the others after their lease. Workers end when the first process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys

import msgspec

from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf.logs import announce
from replaybuf.service import server
from replaybuf.service.options import ServeOptions
from replaybuf.service.sockets import listening_sockets
from replaybuf.service.turns import cancel_all
from replaybuf.store import EmbeddedServer
from replaybuf.wire.decoding import prepared

logger = logging.getLogger(__name__)

ASSIGNMENT = "REPLAYBUF_WORKER"
"""Environment variable that makes a process a worker."""
LARGEST_PORT = 65_535
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Pause before a worker starts again: twice as long each time that it ends soon."""
STEADY_S = 30.0
"""A worker that ran for so long ended for another reason than the one before."""
STOP_TIMEOUT_S = 15.0
_READ_BYTES = 1 << 16


class Assignment(msgspec.Struct, frozen=True):
    """What one worker serves: its number from 1 on, the Redis of all, and the shared sockets by address."""

    number: int
    redis_url: str
    sockets: dict[str, int]


async def serve(options: ServeOptions) -> None:
    """Serve in this process, as one of several workers, or as the process that starts them.

    Raises what prevents the start.
    """
    assignment = os.environ.pop(ASSIGNMENT, None)
    if assignment is not None:
        await _serve_as_worker(options, msgspec.json.decode(assignment, type=prepared(Assignment)))
    elif options.workers == 1:
        await server.serve(options)
    else:
        await _serve_by_workers(options)


async def _serve_as_worker(options: ServeOptions, assignment: Assignment) -> None:
    shared = {url: socket.socket(fileno=fd) for url, fd in assignment.sockets.items()}
    first = sys.stdin.fileno()
    asyncio.get_running_loop().add_reader(first, _stop_at_end_of, first)
    await server.serve(own_options(options, assignment.number, assignment.redis_url), shared)


def _stop_at_end_of(pipe: int) -> None:
    """Stop this worker when the process that started it is gone."""
    if not os.read(pipe, _READ_BYTES):
        asyncio.get_running_loop().remove_reader(pipe)
        os.kill(os.getpid(), signal.SIGTERM)


def own_options(options: ServeOptions, number: int, redis_url: str) -> ServeOptions:
    """Return the options of one worker."""
    folder = options.data_dir if number == 1 else options.data_dir / f"worker-{number}"
    own = dataclasses.replace(options, workers=1, redis_url=redis_url, data_dir=folder, advertise_url=None, uds=None)
    if options.tcp:
        return dataclasses.replace(own, port=options.port + number if options.port else 0)
    return dataclasses.replace(own, uds=options.data_dir / f"worker-{number}.sock")


async def _serve_by_workers(options: ServeOptions) -> None:
    _check(options)
    server.cancel_on_signals()
    embedded = None if options.redis_url else EmbeddedServer(options.data_dir, options.durability)
    with listening_sockets(options) as listening:
        try:
            if embedded:
                await embedded.start()
            redis_url = embedded.url if embedded else str(options.redis_url)
            fds = {url: listener.fileno() for url, listener in listening.items()}
            workers = Workers(options.workers, redis_url, fds)
            _pass_signals_to(workers)
            watching = asyncio.create_task(embedded.watch()) if embedded else None
            try:
                await workers.run(list(listening))
            finally:
                await cancel_all([watching] if watching else [])
        finally:
            if embedded:
                await embedded.stop()
    logger.info("stopped")


def _check(options: ServeOptions) -> None:
    if options.tcp and options.port and options.port + options.workers > LARGEST_PORT:
        last = options.port + options.workers
        detail = (
            f"port is {options.port} and workers is {options.workers}: the last worker needs port {last}; choose a "
            f"--port of at most {LARGEST_PORT - options.workers}"
        )
        raise Invalid(detail, name="port", value=options.port, bound=LARGEST_PORT - options.workers)


def _pass_signals_to(workers: Workers) -> None:
    loop = asyncio.get_running_loop()
    for number in server.SIGNALS:
        loop.add_signal_handler(number, workers.stop)
    loop.add_signal_handler(signal.SIGHUP, workers.signal, signal.SIGHUP)


class Workers:
    """The worker processes of one server: `run` until `stop`."""

    def __init__(self, count: int, redis_url: str, sockets: dict[str, int]) -> None:
        self._assignments = [Assignment(number, redis_url, sockets) for number in range(1, count + 1)]
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._serving = {assignment.number: asyncio.Event() for assignment in self._assignments}
        self._stopping = asyncio.Event()

    async def run(self, addresses: list[str]) -> None:
        """Keep all workers running until `stop`; print the addresses when all of them serve.

        Raises `ServiceUnavailable` if one ends before it has served.
        """
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(self._keep(assignment)) for assignment in self._assignments]
            started = tasks.create_task(self._announce(addresses))
            try:
                await self._stopping.wait()
                await asyncio.wait(keeping, timeout=STOP_TIMEOUT_S)
            finally:
                self.signal(signal.SIGKILL)  # those that are left
                started.cancel()

    def stop(self) -> None:
        """Let all workers answer what they have begun, and end."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send a signal to all workers that run."""
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    process.send_signal(number)

    async def _announce(self, addresses: list[str]) -> None:
        for serving in self._serving.values():
            await serving.wait()
        announce("workers %d", len(self._assignments))
        for address in addresses:
            announce("listening on %s", address)

    async def _keep(self, assignment: Assignment) -> None:
        """Start a worker, and again whenever it ends."""
        loop, number, pause_s = asyncio.get_running_loop(), assignment.number, SHORTEST_PAUSE_S
        while not self._stopping.is_set():
            began_s = loop.time()
            code = await self._run_once(assignment)
            if self._stopping.is_set():
                return
            if not self._serving[number].is_set():
                detail = f"worker {number} ended with {code} before it served; its own message says why"
                raise ServiceUnavailable(detail, name="workers")
            pause_s = SHORTEST_PAUSE_S if loop.time() - began_s > STEADY_S else min(2 * pause_s, LONGEST_PAUSE_S)
            logger.error("worker ended number=%d code=%d; it starts again in %.1f s", number, code, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run_once(self, assignment: Assignment) -> int:
        """Run one worker to its end; return its exit status."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "replaybuf",
            *sys.argv[1:],
            stdin=asyncio.subprocess.PIPE,  # it ends with this process
            stdout=asyncio.subprocess.PIPE,
            pass_fds=tuple(assignment.sockets.values()),
            env=os.environ | {ASSIGNMENT: msgspec.json.encode(assignment).decode()},
        )
        self._processes[assignment.number] = process
        if process.stdout is None:
            raise RuntimeError("a worker has no standard output")
        while part := await process.stdout.read(_READ_BYTES):
            if b"listening on" in part:
                self._serving[assignment.number].set()
        return await process.wait()
