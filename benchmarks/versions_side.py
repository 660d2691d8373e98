"""One version in turns with another: measure a round for each line of standard input. `versions.py` starts it.

    ../before/.venv/bin/python benchmarks/versions_side.py GROUPS

Uses what every version has: `Client`, `encode_frame`, `read_batch` and the routes.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from groups import random_group
from served import Served

from replaybuf.client.client import Client
from replaybuf.wire.batch import read_batch
from replaybuf.wire.frame import MEDIA_TYPE, encode_frame
from replaybuf.wire.group import Group

ROLLOUTS, TOKENS, TOGETHER = 8, 2048, 8
TINY_TOKENS = 4
WARM_GROUPS = 160
TIMEOUT_S = 120.0
ALONE, EIGHT, CLIENT_ALONE, CLIENT_EIGHT = "append of one", "of eight", "Client, append of one", "Client, of eight"
JSON_ALONE, JSON_EIGHT, TRAINED = "JSON, append of one", "JSON, of eight", "fetch, ack, publish of eight"
PHASES = (ALONE, EIGHT, CLIENT_ALONE, CLIENT_EIGHT, JSON_ALONE, JSON_EIGHT, TRAINED)

Figures = dict[str, dict[str, float]]
"""By phase: `rate` in groups per second, and `cpu_ms` of the service per call."""


def main() -> None:
    """Serve, and measure a round for each line."""
    groups = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as served:
        measured_round(served, "warm", WARM_GROUPS)
        for number, _ in enumerate(sys.stdin):
            print(json.dumps(measured_round(served, f"round-{number}", groups)), flush=True)


def measured_round(served: Served, run: str, groups: int) -> Figures:
    """Measure all phases in two new runs, one of them for JSON."""
    figures: Figures = {}
    appended = 4 * groups
    config = {
        "batch": {"tokens_per_batch": None, "groups_per_batch": TOGETHER, "seq_len": 2 * TOKENS},
        "strategy": {"options": {"max_staleness": appended}},
    }
    made, tiny = map(made_group, itertools.count()), map(tiny_group, itertools.count())
    tiny_run = f"{run}-json"

    def timed(phase: str, calls: int, work: Callable[[], float]) -> None:
        before_s = cpu_s(served.pid)
        seconds = work()
        cpu_ms = 1e3 * (cpu_s(served.pid) - before_s) / calls
        figures[phase] = {"rate": groups / seconds * (appended / groups if phase == TRAINED else 1), "cpu_ms": cpu_ms}

    with Client(served.url, run, timeout_s=TIMEOUT_S) as client:
        client.put_run(config)
        with Client(served.url, tiny_run) as other:
            other.put_run(config)
        for phase, per_call in ((ALONE, 1), (EIGHT, TOGETHER)):
            calls = groups // per_call
            bodies = [b"".join(encode_frame(next(made)) for _ in range(per_call)) for _ in range(calls)]
            timed(phase, calls, lambda: posts(served.url, run, MEDIA_TYPE, bodies))  # noqa: B023 - called at once
        for phase, per_call in ((CLIENT_ALONE, 1), (CLIENT_EIGHT, TOGETHER)):
            calls = groups // per_call
            together = [[next(made) for _ in range(per_call)] for _ in range(calls)]
            timed(phase, calls, lambda: appends(client, together))  # noqa: B023
        for phase, per_call in ((JSON_ALONE, 1), (JSON_EIGHT, TOGETHER)):
            calls = groups // per_call
            texts = [json.dumps({"groups": [next(tiny) for _ in range(per_call)]}).encode() for _ in range(calls)]
            timed(phase, calls, lambda: posts(served.url, tiny_run, "application/json", texts))  # noqa: B023
        timed(TRAINED, appended // TOGETHER, lambda: train(client, appended // TOGETHER))
    return figures


def made_group(number: int) -> Group:
    """Make a group of eight rollouts of full length."""
    # The drawn lengths are far above `longest`, so every rollout has exactly that length.
    rng = np.random.default_rng(number % TOGETHER)
    return random_group(rng, number, rollouts=ROLLOUTS, mean_tokens=1_000_000, longest=TOKENS)


def tiny_group(number: int) -> dict[str, Any]:
    """Make a group of eight rollouts of a few tokens, as a producer writes it by hand."""
    ids = list(range(TINY_TOKENS))
    rollout = {"prompt_ids": ids, "completion_ids": ids, "inference_logprobs": [-0.5] * TINY_TOKENS}
    rollouts = [rollout | {"reward": float(place % 2)} for place in range(ROLLOUTS)]
    return {"group_id": f"j{number}", "prompt_id": f"p{number}", "policy_version": 0, "rollouts": rollouts}


def posts(url: str, run: str, media_type: str, bodies: Sequence[bytes]) -> float:
    """Append one prepared body after the other on one connection; return the seconds."""
    head = "POST /v1/runs/{}/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"
    requests = [head.format(run, media_type, len(body)).encode() + body for body in bodies]
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun_s = perf_counter()
        for request in requests:
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b"}"):
                part = connection.recv(65_536)
                answer += part
                if not part or not answer.startswith(b"HTTP/1.1 200 "):
                    raise RuntimeError(f"not stored: {answer!r}")
        return perf_counter() - begun_s


def appends(client: Client, together: Sequence[Sequence[Group]]) -> float:
    """Append through the client of this version, which encodes the groups too; return the seconds."""
    begun_s = perf_counter()
    for groups in together:
        client.append(groups)
    return perf_counter() - begun_s


def train(client: Client, steps: int) -> float:
    """Fetch, ack and publish batches of eight groups; return the seconds."""
    epoch = client.attach(dp_world_size=1, resume_step=0).epoch
    begun_s = perf_counter()
    for step in range(steps):
        body = client.fetch_batch(step, epoch, wait_ms=int(TIMEOUT_S * 500))
        if not isinstance(body, bytes) or read_batch(body).meta.batch_groups != TOGETHER:
            raise RuntimeError(f"no batch: {body!r:.100}")
        client.ack(step, epoch)
        client.publish_policy(step + 1, epoch)
    seconds = perf_counter() - begun_s
    client.checkpoint(steps, epoch)
    return seconds


def cpu_s(pid: int) -> float:
    """Read the processor time of a process and its threads. `psutil` counts in steps of 10 ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    main()
