"""Measure an append by HTTP against the least that a durable append needs.

    python benchmarks/floor.py --rounds 5

- floor: `floor_server.py`, the reference.
- replaybuf: the service. With `--client` also through `replaybuf.Client`, which encodes the groups too.

Both store the same frames of 8 rollouts x 2,048 tokens in a strict Valkey of their own, one group or eight in a call,
one call after another on one connection. Sides take turns. Each round measures processor milliseconds of the server
per call, and groups per second.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
from groups import random_group
from measured import Measured, Target
from served import Served

from replaybuf.client.client import Client
from replaybuf.wire.frame import MEDIA_TYPE, encode_frame
from replaybuf.wire.group import Group

FLOOR, SERVICE, CLIENT = "floor", "replaybuf", "replaybuf, Client"
RUN = "floor"
ROLLOUTS, MEAN_TOKENS = 8, 2048
WARM_CALLS = 20
TIMEOUT_S = 60.0
CPU_TARGETS = {1: 2.2, 8: 1.8}
"""Processor time of the service for a call of so many groups, as a multiple of the floor's."""
RATE_TARGETS = {1: 0.8, 8: 0.9}


@dataclasses.dataclass(frozen=True)
class Side:
    """A server, and what stores groups on it."""

    pid: int
    send: Callable[[list[list[Group]]], float]
    """Store these groups, one call for each inner list; return the seconds."""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=400, help="per round and side")
    parser.add_argument("--client", action="store_true", help="also measure replaybuf.Client")
    options = parser.parse_args()
    packages = ["redis", "hiredis", "uvicorn", "uvloop", "numpy", "msgspec"]
    results = Measured("floor", reference=FLOOR, packages=packages, settings=vars(options))
    with tempfile.TemporaryDirectory() as folder, sides(Path(folder), client=options.client) as by_name:
        numbers = numbered_groups()
        for per_call in (1, 8):
            cpu_ms, rates = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
            for turn in range(-1, options.rounds):  # the first turn warms up
                names = list(by_name)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    calls = WARM_CALLS if turn < 0 else options.groups // per_call
                    groups = [[next(numbers) for _ in range(per_call)] for _ in range(calls)]
                    before_s = cpu_s(by_name[name].pid)
                    seconds = by_name[name].send(groups)
                    if turn >= 0:
                        cpu_ms[name].append(1e3 * (cpu_s(by_name[name].pid) - before_s) / calls)
                        rates[name].append(calls * per_call / seconds)
            record(results, per_call, cpu_ms, rates)
    results.save()


def record(results: Measured, per_call: int, cpu_ms: dict[str, list[float]], rates: dict[str, list[float]]) -> None:
    """Record the figures of calls of one size."""
    what = f"call of {per_call}"
    most, least = Target("ratio", "at most", CPU_TARGETS[per_call]), Target("ratio", "at least", RATE_TARGETS[per_call])
    results.record(f"{what}, processor time of the server", cpu_ms, unit="ms", targets={SERVICE: [most]})
    results.record(f"{what}, rate", rates, unit="groups/s", targets={SERVICE: [least]})


def numbered_groups() -> Iterator[Group]:
    """Yield the same group under ever new ids."""
    group = random_group(np.random.default_rng(0), 0, rollouts=ROLLOUTS, mean_tokens=MEAN_TOKENS)
    number = 0
    while True:
        number += 1
        yield msgspec.structs.replace(group, group_id=f"g{number}")


@contextmanager
def sides(folder: Path, *, client: bool) -> Iterator[dict[str, Side]]:
    """Start both servers, each with its own Valkey."""
    for name in ("a", "b"):
        (folder / name).mkdir()
    with (
        Served(folder / "a" / "data") as served,
        Served(folder / "b" / "data") as other,
        Client(served.url, RUN, timeout_s=TIMEOUT_S) as caller,
    ):
        caller.put_run({"batch": {"tokens_per_batch": None, "groups_per_batch": 64, "seq_len": 16_384}})
        other.kill()  # its Valkey stays, with our functions
        command = [sys.executable, str(Path(__file__).parent / "floor_server.py")]
        floor = subprocess.Popen(
            [*command, str(other.folder / "valkey.sock"), str(folder)], stdout=subprocess.PIPE, text=True
        )
        try:
            port = int(floor.stdout.readline()) if floor.stdout else 0
            address = urlsplit(served.url)
            by_name = {
                FLOOR: Side(floor.pid, functools.partial(send, ("127.0.0.1", port))),
                SERVICE: Side(served.pid, functools.partial(send, (str(address.hostname), int(address.port or 0)))),
            }
            if client:
                by_name[CLIENT] = Side(served.pid, functools.partial(append, caller))
            yield by_name
        finally:
            floor.kill()
            floor.wait(TIMEOUT_S)


def send(address: tuple[str, int], groups: Sequence[Sequence[Group]]) -> float:
    """Send prepared requests on a plain socket; return the seconds."""
    head = b"POST /v1/runs/%b/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    bodies = [b"".join(map(encode_frame, together)) for together in groups]
    requests = [head % (RUN.encode(), MEDIA_TYPE.encode(), len(body)) + body for body in bodies]
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began_s = time.perf_counter()
        for request, together in zip(requests, groups, strict=True):
            connection.sendall(request)
            answer = b""
            while answer.count(b'"stored"') < len(together):
                part = connection.recv(65_536)
                answer += part
                if not part or (b"\r\n\r\n" in answer and not answer.startswith(b"HTTP/1.1 200 ")):
                    raise RuntimeError(f"not stored: {answer!r}")
        return time.perf_counter() - began_s


def append(client: Client, groups: Sequence[Sequence[Group]]) -> float:
    """Append through our client; return the seconds."""
    began_s = time.perf_counter()
    for together in groups:
        client.append(together)
    return time.perf_counter() - began_s


def cpu_s(pid: int) -> float:
    """Read the processor time of a process and its threads. `psutil` counts in steps of 10 ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    main()
