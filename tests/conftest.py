"""Servers for tests: `replaybuf serve` processes, each with an embedded Valkey, on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Generic, Protocol, Self, TypeVar

import httpx
import pytest
from hypothesis import settings

from replaybuf.store import EmbeddedServer
from tests.forked import ForkedProcess, can_fork
from tests.waiting import eventually

settings.register_profile("tests", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("tests")
"""The same examples on every machine, and no deadline, because a busy machine is slow. `pytest
--hypothesis-profile=thorough` looks at many more, other ones each time."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Of torch, in every process: threads that wait for each other spin, which is ten times the work on a busy machine."""


LONGEST = ("trainer/test_two_tenants.py", "trainer/parallel/test_torchrun.py", "test_prometheus.py")
"""Files of a minute or more that come late by name."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: one that starts last runs on when all other workers have nothing left."""
    longest = {Path(__file__).parent / name for name in LONGEST}
    items.sort(key=lambda item: item.path not in longest)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    test, fixtures = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    asyncio.run(test(**{name: fixtures[name] for name in inspect.signature(test).parameters}))
    return True


def pytest_collection_finish() -> None:
    """Leave what lives as long as the tests out of garbage collections: one would take a second on a busy machine."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let modules be freed: libraries in C++ report a leak otherwise."""
    gc.unfreeze()


START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
_names = itertools.count()


class ServeProcess:
    """One `replaybuf serve` on a data folder; `start` again after `kill` or `stop` serves the same data.

    `module` is the module to run: the command line or a wrapper of it.
    `python` is the interpreter; its environment decides which plug-ins are found.
    """

    module = "replaybuf"
    address = r"(?:\{.*\")?listening on (http://[^\s\"]+)"
    port = "0"
    """0 = a free one."""

    def __init__(self, data_dir: Path, *options: str, python: str = sys.executable) -> None:
        self.data_dir = data_dir
        self.python = python
        self.options = options
        self.environment: dict[str, str] = {}
        self.url = ""
        self._process: ForkedProcess | subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None
        self._groups: list[int] = []

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def valkey_socket(self) -> str:
        """Socket of the embedded Valkey; outside the data folder if that path is too long."""
        return str(EmbeddedServer(self.data_dir).socket_path)

    def start(self) -> Self:
        """Start the server and wait until it prints its address."""
        if self._log is None:
            self._log = (self.data_dir.parent / f"{self.data_dir.name}.log").open("a+")
        self._process = self._launch(["serve", "--port", self.port, "--data-dir", str(self.data_dir), *self.options])
        assert self._process.stdout is not None
        self._groups.append(self._process.pid)
        for line in self._process.stdout:
            match = re.match(self.address, line)
            if match:
                self.url = match[1]
                return self
        raise AssertionError(f"serve ended with {self._process.wait(START_TIMEOUT_S)}: {self.log()}")

    def _launch(self, arguments: list[str]) -> ForkedProcess | subprocess.Popen[str]:
        """Fork the process, or start an interpreter if it is another one or has other variables."""
        assert self._log is not None
        environment = os.environ | self.environment
        if self.python == sys.executable and can_fork(environment):
            return ForkedProcess(self.module, arguments, environment, self._log)
        return subprocess.Popen(
            [self.python, "-m", self.module, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def log(self) -> str:
        """Return what the server logged so far."""
        assert self._log is not None
        self._log.seek(0)
        return self._log.read()

    def signal(self, number: int) -> None:
        """Send a signal to the server alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the server with SIGKILL; its embedded Valkey continues to run."""
        self.signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> int:
        """Stop the server with SIGTERM; return its exit code."""
        if self._process is None or self._process.poll() is not None:
            return 0
        self.signal(signal.SIGTERM)
        return self._wait()

    def end(self) -> None:
        """Kill the server and its Valkey, which is in the same process group."""
        if self._process is None:
            return
        for group in self._groups:  # a Valkey stays in the group of the server that started it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._wait()
        if self._log is not None:
            self._log.close()

    def _wait(self) -> int:
        assert self._process is not None and self._process.stdout is not None
        code = self._process.wait(STOP_TIMEOUT_S)
        self._process.stdout.close()
        return code


class ClockedServe(ServeProcess):
    """A service with a clock that tests advance, so that they need not wait; `stopped`: nothing else advances it."""

    module = "tests.clocked"

    def __init__(self, data_dir: Path, clock: Path, *, stopped: bool = False) -> None:
        super().__init__(data_dir)
        self.environment["CLOCK_FILE"] = str(clock)
        self._stopped = f" {time.time()} {time.monotonic()}" if stopped else ""
        self._clock, self._passed_s, self._jumped_s = clock, 0.0, 0.0
        self.put_forward(0.0)

    def put_forward(self, by_s: float) -> None:
        """Let `by_s` seconds pass."""
        self._passed_s += by_s
        self._write()

    def jump(self, by_s: float) -> None:
        """Set the wall clock forward (or back) while no time passes, as a time server does."""
        self._jumped_s += by_s
        self._write()

    def _write(self) -> None:
        scratch = self._clock.with_suffix(".new")
        scratch.write_text(f"{self._passed_s} {self._jumped_s}{self._stopped}")
        scratch.rename(self._clock)


class LastingServe(ServeProcess):
    """A service that keeps its runs, and gets none from others, however long a busy machine lets it stand still."""

    module = "tests.soon_steady"

    def __init__(self, data_dir: Path, *options: str) -> None:
        super().__init__(data_dir, *options)
        self.environment |= {"STEADY_S": "1e9", "LEASE_S": "600"}


JSON = {"content-type": "application/json"}
"""Header of a body that a test writes itself."""


NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody. The services of tests speak plain HTTP, and reading all certificates takes 20 ms per client."""


class RunClient:
    """HTTP client of one run that does not use the code of the package."""

    def __init__(self, url: str, run: str) -> None:
        self.run = run
        self.http = httpx.Client(base_url=url, timeout=30.0, verify=NO_CERTIFICATES)
        self.path = f"/v1/runs/{run}"

    def put(self, **config: Any) -> httpx.Response:
        """Create the run."""
        return self.http.put(self.path, json=config)

    def state(self) -> dict[str, Any]:
        """Return the state of the run."""
        response = self.http.get(self.path)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def post(self, call: str, **body: Any) -> httpx.Response:
        """POST a JSON body to a call of the run."""
        return self.http.post(f"{self.path}/{call}", json=body)

    def get(self, call: str, **query: Any) -> httpx.Response:
        """GET a call of the run."""
        return self.http.get(f"{self.path}/{call}", params=query)

    def attach(self, resume_step: int = 0, **options: Any) -> int:
        """Attach and return the epoch."""
        response = self.post(
            "attach", resume_step=resume_step, dp_world_size=options.pop("dp_world_size", 1), **options
        )
        assert response.status_code == 200, response.text
        return int(response.json()["epoch"])

    def append(self, *groups: dict[str, Any]) -> list[dict[str, Any]]:
        """Append groups; return the results."""
        response = self.post("groups", groups=list(groups))
        assert response.status_code in (200, 422), response.text
        results: list[dict[str, Any]] = response.json()["results"]
        return results

    def batch(self, step: int, epoch: int, **query: Any) -> httpx.Response:
        """Request a batch."""
        return self.get(f"batches/{step}", epoch=epoch, **query)

    def ready_batch(self, step: int, epoch: int, within_s: float = 60.0) -> httpx.Response:
        """Request a batch until there is one: processes that start on a busy machine take a while."""
        poll = functools.partial(self.batch, step, epoch, wait_ms=20000)
        return eventually(poll, within_s, lambda response: response.status_code == 200)

    def ack(self, step: int, epoch: int, **body: Any) -> httpx.Response:
        """Ack a step."""
        return self.post(f"batches/{step}/ack", epoch=epoch, **body)

    def publish(self, version: int, epoch: int) -> httpx.Response:
        """Publish a version."""
        return self.post("policy", epoch=epoch, version=version)

    def train(self, epoch: int, steps: range) -> list[bytes]:
        """Get, ack and publish these steps; return the bodies."""
        bodies = []
        for step in steps:
            response = self.batch(step, epoch)
            assert response.status_code == 200, response.text
            bodies.append(response.content)
            assert self.ack(step, epoch).status_code == 200
            assert self.publish(step + 1, epoch).status_code == 200
        return bodies

    def reach_version(self, version: int) -> None:
        """Train a new run, whose batches have one group, until it has published this version."""
        epoch = self.attach()
        for step in range(version):
            self.append(group(f"version-{step}", step))
            self.train(epoch, range(step, step + 1))


def lasting(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a run without what time alone changes: how long ago its clients called, how long it waits."""
    return {name: value for name, value in state.items() if name not in ("trainer", "producers", "waiting_s")}


def group(
    group_id: str | None, version: int = 0, *, rollouts: int = 2, tokens: int = 5, **fields: Any
) -> dict[str, Any]:
    """Build a group as JSON: each rollout has 2 prompt tokens and `tokens - 2` completion tokens."""
    length = tokens - 2
    return {
        "group_id": group_id,
        "prompt_id": f"test/{group_id}",
        "policy_version": version,
        "rollouts": [
            {
                "prompt_ids": [1, 2],
                "completion_ids": [3 + number] * length,
                "inference_logprobs": [-0.5] * length,
                "reward": float(number % 2),
            }
            for number in range(rollouts)
        ],
        **fields,
    }


@pytest.fixture(autouse=True)
def _remove_new_log_handlers() -> Iterator[None]:
    """A command in this process adds a handler for a file, or for stderr, which pytest closes after the test."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()


MOST_RUNS = 30
S = TypeVar("S", bound=ServeProcess)


class SharedService(Generic[S]):
    """A service that files share, until it has many runs; then the next file gets a new one.

    Nobody uses the runs of earlier tests, but each takes 0.4 ms of the processor per second and 1.4 ms per scrape: the
    service of all tests of a worker would spend more on them than on the tests.
    """

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._server: S | None = None

    def server(self) -> S:
        """Return the service for one file."""
        if self._server is None or self._runs(self._server) > MOST_RUNS:
            self.end()
            self._server = self._make()
            self._server.start()
        return self._server

    def _runs(self, server: S) -> int:
        return len(httpx.get(f"{server.url}/v1/runs", verify=NO_CERTIFICATES, timeout=30.0).json()["runs"])

    def end(self) -> None:
        """End the service."""
        if self._server is not None:
            self._server.end()


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedService[ServeProcess]]:
    """The source of `service`."""
    shared = SharedService(lambda: ServeProcess(tmp_path_factory.mktemp("service") / "data"))
    yield shared
    shared.end()


@pytest.fixture(scope="module")
def service(shared_service: SharedService[ServeProcess]) -> ServeProcess:
    """Shared service for tests that do not restart it; each test creates its own runs."""
    return shared_service.server()


@pytest.fixture
def own_service(tmp_path: Path) -> Iterator[ServeProcess]:
    """Private service that a test may kill and restart."""
    server = ServeProcess(tmp_path / "data").start()
    yield server
    server.end()


class Starter(Protocol):
    """Starts a server that ends with the test."""

    def __call__(self, server: S, /) -> S: ...


@pytest.fixture
def started() -> Iterator[Starter]:
    """Start any servers of a test and end them, with their Valkey, after it."""
    with contextlib.ExitStack() as stack:

        def start(server: S) -> S:
            stack.callback(server.end)
            return server.start()

        yield start


@pytest.fixture(scope="session")
def shared_clocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedService[ClockedServe]]:
    """The source of `clocked`."""

    def make() -> ClockedServe:
        folder = tmp_path_factory.mktemp("clocked")
        return ClockedServe(folder / "data", folder / "clock")

    shared = SharedService(make)
    yield shared
    shared.end()


@pytest.fixture(scope="module")
def clocked(shared_clocked: SharedService[ClockedServe]) -> ClockedServe:
    """Shared service with a test clock; each test creates its own runs."""
    return shared_clocked.server()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One embedded Valkey per module, for tests without a service process."""
    embedded = EmbeddedServer(tmp_path_factory.mktemp("valkey"))
    asyncio.run(embedded.start())
    yield embedded
    asyncio.run(embedded.stop())


@pytest.fixture
def run(service: ServeProcess) -> Iterator[RunClient]:
    """A client with a new run name on the shared service; the run does not exist yet."""
    client = RunClient(service.url, f"run-{next(_names)}")
    yield client
    client.http.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str, str], RunClient]]:
    """Make clients of any server and close them at the end of the test."""
    with contextlib.ExitStack() as stack:

        def open_client(url: str, name: str) -> RunClient:
            client = RunClient(url, name)
            stack.callback(client.http.close)
            return client

        yield open_client
