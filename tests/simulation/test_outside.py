"""No module takes time, chance, threads or sockets from a place that the simulated world does not replace."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import replaybuf

PRODUCT = Path(replaybuf.__file__).parent
FOLDERS = ("service", "store", "client", "generator")
OUTSIDE = {"time", "secrets", "random", "uuid", "socket", "subprocess", "threading", "datetime", "select", "selectors"}
"""Modules that reach outside a process, or differ from run to run."""
REPLACED = {"time.time", "time.time_ns", "time.monotonic", "time.perf_counter", "secrets.token_hex", "random.Random"}
"""What the world replaces during a schedule, and what depends on a seed alone; `to_thread` runs on its loop."""
HARMLESS = {
    "datetime.datetime.fromtimestamp",
    "datetime.UTC",
    "threading.Lock",
    "threading.RLock",
    "threading.Event",
    "threading.local",
}
EXCEPTIONS = {
    "service/bodies/release.py": "a thread that gives memory back",
    "service/child_processes.py": "starts child processes",
    "service/http/body/decoder_process.py": "the socket of a child process",
    "service/http/guard/handshake.py": "sockets of HTTP clients",
    "service/http/guard/origins.py": "names of this machine",
    "service/http/guard/token_file.py": "secrets that people use",
    "service/run/append/admission_process.py": "the socket of a child process",
    "service/server.py": "starts the HTTP server",
    "service/sockets.py": "opens sockets for HTTP",
    "service/workers.py": "starts servers",
    "store/redis/embedded.py": "starts Valkey",
    "client/http_client.py": "a client in a process of its users",
    "client/reader.py": "a thread that reads ahead",
    "client/retries.py": "pauses of clients",
    "client/transport.py": "sockets of clients",
    "generator/child_process.py": "starts child processes",
    "generator/environments/reward_worker.py": "a thread of a child process",
    "generator/options.py": "names of this machine",
    "generator/stage/stage_daemon.py": "order of groups of a stage",
    "generator/threads.py": "threads of reward functions",
}
"""Modules that reach outside, and for what. No schedule runs these parts of them."""


def test_clocks_chance_threads_and_sockets_come_from_the_world() -> None:
    """A schedule that took one from elsewhere would differ each time, and could not be replayed."""
    used = {name: sorted(_outside(path)) for name, path in _modules()}
    assert {name: uses for name, uses in used.items() if uses and name not in EXCEPTIONS} == {}
    assert {name for name in EXCEPTIONS if not used.get(name)} == set()


def _modules() -> Iterator[tuple[str, Path]]:
    for folder in FOLDERS:
        for path in sorted((PRODUCT / folder).rglob("*.py")):
            yield path.relative_to(PRODUCT).as_posix(), path


def _outside(path: Path) -> Iterator[str]:
    """Yield what a module takes from outside, by its full name; names that are imported alone cannot be replaced."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in OUTSIDE and not node.level:
            yield from {f"{node.module}.{alias.name}" for alias in node.names} - HARMLESS
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            outside = node.value.id in OUTSIDE and name not in REPLACED | HARMLESS
            if outside or name in ("os.urandom", "asyncio.open_connection", "asyncio.create_subprocess_exec"):
                yield name
