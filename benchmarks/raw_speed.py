"""Speed of Redis and of loopback TCP alone, as bounds of any path through them: further references of `path.py`."""

from __future__ import annotations

import multiprocessing as mp
import shutil
import socket
import subprocess
import time
from pathlib import Path

from served import Served

TIMEOUT_S = 120.0


def raw_sets(
    served: Served, size: int, count: int, tokens: float, *, clients: int, at_once: int
) -> dict[str, list[float]]:
    """SET payloads of one size only, by `clients` with `at_once` commands each; return M tokens/s by name."""
    speeds = {"SETs by a socket": [count * tokens / sets_by_socket_s(served, size, count, at_once) / 1e6]}
    program = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
    if program is None:
        print("redis-benchmark is not installed; SETs by a socket replace it")
        return speeds
    options = ["-t", "set", "-d", str(size), "-n", str(count), "-c", str(clients), "-P", str(at_once)]
    socket_path = str(served.folder / "valkey.sock")
    done = subprocess.run(
        [program, "-s", socket_path, *options, "--csv"], check=True, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    rate = float(done.stdout.splitlines()[-1].split(",")[1].strip('"'))
    return speeds | {Path(program).name: [rate * tokens / 1e6]}


def sets_by_socket_s(served: Served, size: int, count: int, at_once: int) -> float:
    """Send prepared SET commands, `at_once` at a time; return seconds."""
    commands = b"".join(
        b"*3\r\n$3\r\nSET\r\n$5\r\nraw:%d\r\n$%d\r\n%b\r\n" % (n, size, bytes(size)) for n in range(at_once)
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(served.folder / "valkey.sock"))
        begun = time.perf_counter()
        for _ in range(count // at_once):
            connection.sendall(commands)
            left = at_once * len(b"+OK\r\n")
            while left:
                left -= len(connection.recv(left))
        return time.perf_counter() - begun


def loopback_s(size: int, repeats: int) -> list[float]:
    """Send bytes from one process to another by TCP; return the seconds of each time."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = mp.get_context("spawn").Process(target=send_on, args=(listener.getsockname()[1], size), daemon=True)
    sender.start()
    listener.settimeout(TIMEOUT_S)
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(size))
    took = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        connection.sendall(b"n")
        at = 0
        while at < size:
            at += connection.recv_into(buffer[at:])
        took.append(time.perf_counter() - begun)
    connection.close()
    listener.close()
    sender.kill()
    sender.join()
    return took[1:]


def send_on(port: int, size: int) -> None:
    """Send the bytes at each request."""
    data = bytes(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1):
            connection.sendall(data)
