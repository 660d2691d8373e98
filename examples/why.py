"""Show an answer of docs/why.md on a private service: `python examples/why.py resume`, or another question.

Needs `pip install 'replaybuf[server]'`. Each takes a few seconds, writes to a temporary folder only, and prints what it
saw.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replaybuf.client import Client, attach_at, group_builder
from replaybuf.errors import RunFinished
from replaybuf.wire.contract import WaitingAnswer

BATCH = {"groups_per_batch": 2, "seq_len": 64}


class Service:
    """`replaybuf serve` with a private Valkey; `kill` is kill -9 of both."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Start on the same data and wait for the address."""
        command = [sys.executable, "-m", "replaybuf", "serve", "--port", "0", "--data-dir", str(self._folder)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        lines = iter(self._process.stdout.readline, "") if self._process.stdout else iter(())
        self.url = next(line.split()[-1] for line in lines if "listening on" in line)

    def kill(self) -> None:
        """Kill service and Valkey with SIGKILL."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def service() -> Iterator[Service]:
    """Serve an empty folder until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        served = Service(Path(folder) / "data")
        try:
            yield served
        finally:
            served.kill()


def produce(client: Client, count: int) -> int:
    """Append up to `count` groups of two rollouts, one per ticket; return how many."""
    tickets = client.take_tickets("example", count)
    groups = []
    for ticket in tickets.tickets:
        name, version = f"prompt/{ticket.prompt_index}", tickets.published_version
        group = group_builder([1, 2], prompt_id=name, policy_version=version, ticket=ticket)
        groups.append(group.add([3, 4], [-0.5, -0.5], 1.0).add([3, 5], [-0.5, -0.7], 0.0).build())
    return len(client.append(groups))


def train(client: Client, epoch: int, steps: range) -> list[bytes]:
    """Produce, fetch, ack and publish these steps; return the bodies."""
    bodies = []
    for step in steps:
        while isinstance(body := client.fetch_batch(step, epoch), WaitingAnswer):
            produce(client, 2)
        bodies.append(body)
        client.ack(step, epoch)
        client.publish_policy(step + 1, epoch)
    return bodies


def resume() -> None:
    """Kill everything after steps that no checkpoint has; resume; look at every prompt."""
    with service() as served:
        with Client(served.url, "why") as client:
            client.put_run({"batch": BATCH, "tickets": {"prompts": 12}})
            epoch = client.attach().epoch
            before = train(client, epoch, range(2))
            client.checkpoint(2, epoch)
            before += train(client, epoch, range(2, 4))
        served.kill()
        served.start()
        with Client(served.url, "why") as client:
            epoch = attach_at(client, 2).epoch
            after = train(client, epoch, range(2, 6))
            print(f"steps 2 and 3 again: the same bytes: {after[:2] == before[2:]}")
            records = [client.get_record(step) for step in range(6)]
            trained = Counter(group.prompt_index for record in records for group in record.groups)
            print(f"12 prompts, trained once each: {trained == Counter(range(12))}")


def durable() -> None:
    """Kill service and Valkey while groups are appended; count what is there afterwards."""
    with service() as served:
        stored = 0
        with Client(served.url, "why") as client:
            wide = {"name": "one-step-off-policy", "options": {"max_staleness": 99}}  # so that all groups stay live
            client.put_run({"batch": BATCH, "strategy": wide})
            while stored < 60:
                stored += produce(client, 4)
        served.kill()
        served.start()
        with Client(served.url, "why") as client:
            live = client.get_run().groups.live
            print(f"answered stored: {stored}; found after kill -9, before any checkpoint: {live}")


def staleness() -> None:
    """Append a group that took three steps too long; look at the staleness of what was trained."""
    with service() as served, Client(served.url, "why") as client:
        client.put_run({"batch": BATCH})
        epoch = client.attach().epoch
        late = client.take_tickets("slow", 1).tickets[0]
        group = group_builder([1, 2], prompt_id="slow", policy_version=0, ticket=late).add([3], [-0.5], 1.0).build()
        train(client, epoch, range(3))
        (result,) = client.append([group])
        train(client, epoch, range(3, 5))
        seen = Counter(group.staleness for step in range(5) for group in client.get_record(step).groups)
        status = client.get_run()
        print(f"max_staleness is 1; trained groups by staleness: {dict(sorted(seen.items()))}")
        print(f"the late group: {result.status}; dropped: {dict(status.groups.evicted)}")


def waiting() -> None:
    """Ask for a batch that is not there, and for a ticket that nobody may have."""
    with service() as served, Client(served.url, "why") as client:
        client.put_run({"batch": BATCH})
        epoch = client.attach().epoch
        produce(client, 1)
        why: Any = client.fetch_batch(0, epoch)
        print(f"no batch: {why.reason}, blocked on {why.blocked_on}, have {why.have}, need {why.need}")
        while produce(client, 8):
            pass
        denied: Any = client.take_tickets("example", 1).waiting
        print(f"no ticket: {denied.reason}, blocked on {denied.blocked_on}")


def replay() -> None:
    """Use each group twice, and look at the ledger."""
    options = {"max_uses": 2, "max_staleness": 8}
    with service() as served, Client(served.url, "why") as client:
        client.put_run({"batch": BATCH, "strategy": {"name": "replay", "options": options}})
        epoch = client.attach().epoch
        train(client, epoch, range(6))
        uses = Counter(group.group_id for step in range(6) for group in client.get_record(step).groups)
        print(f"6 batches of 2 groups from {len(uses)} groups; most uses of one group: {max(uses.values())}")


def failed() -> None:
    """Fail one prompt at every attempt; the others are trained, and the run ends."""
    with service() as served, Client(served.url, "why") as client:
        client.put_run({"batch": BATCH, "tickets": {"prompts": 5, "max_attempts": 2}})
        epoch = client.attach().epoch
        for _ in range(2):
            (ticket,) = client.take_tickets("example", 1).tickets
            client.return_ticket(ticket.ticket, "reward_raised")
        steps = 0
        try:
            while True:
                train(client, epoch, range(steps, steps + 1))
                steps += 1
        except RunFinished:
            status = client.get_run()
            print(f"prompts failed: {status.tickets.failed}; steps trained: {steps}; the run is {status.state}")


QUESTIONS = {question.__name__: question for question in (resume, durable, staleness, waiting, replay, failed)}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in QUESTIONS:
        raise SystemExit(f"usage: python examples/why.py {'|'.join(QUESTIONS)}")
    QUESTIONS[sys.argv[1]]()
