"""Producer of tests: a thread that appends a group for every ticket of a run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from replaybuf.client import Client, group_builder
from replaybuf.errors import NotFound, RunFinished
from replaybuf.wire.contract import Ticket
from replaybuf.wire.group import Group
from tests.conftest import RunClient

Rows = list[tuple[int, ...]]
WEIGHTED = {"name": "replay", "options": {"order": "prioritized", "importance": 0.5, "max_staleness": 1}}
"""A strategy whose batches have sampling weights."""
JOIN_TIMEOUT_S = 90.0


def numbered_group(ticket: Ticket, version: int) -> Group:
    """Build the group of a ticket, whose tokens name its prompt: rollout 1 has the text of a tool in it."""
    index = ticket.prompt_index
    builder = group_builder([7, 8], prompt_id=f"p/{index}", policy_version=version, ticket=ticket, temperature=0.5)
    builder.add([100 + index, 5], [-0.25, -0.5], 1.0)
    builder.add([100 + index, 6, 9], [-0.25, 0.0, -1.0], 0.0, mask=[1, 0, 1])
    return builder.build()


def recorded_rows(run: RunClient, steps: int) -> list[Rows]:
    """Return the tokens of each step of the surviving history, as the ledger and `numbered_group` have them."""
    rows: list[Rows] = []
    for step in range(steps):
        groups = [group["prompt_index"] for group in run.get(f"batches/{step}/record").json()["groups"]]
        rows.append(sorted(row for index in groups for row in ((7, 8, 100 + index, 5), (7, 8, 100 + index, 6, 9))))
    return rows


class TicketProducer(threading.Thread):
    """Appends `group_of(ticket, published version)` for every ticket, until it is stopped."""

    def __init__(self, url: str, run: str, group_of: Callable[[Ticket, int], Group] = numbered_group) -> None:
        super().__init__(daemon=True)
        self._url, self._run_name, self._group_of = url, run, group_of
        self._stopped = threading.Event()

    def run(self) -> None:
        with Client(self._url, self._run_name, retry_for_s=30.0) as client:
            while not self._stopped.is_set():
                taken = client.take_tickets("test", 4, wait_ms=200)
                groups = [self._group_of(ticket, taken.published_version) for ticket in taken.tickets]
                try:
                    results = client.append(groups)
                except RunFinished:  # its last step was trained meanwhile
                    continue
                for ticket, result in zip(taken.tickets, results, strict=True):
                    if result.status == "rejected":  # of a version that a rewind took back
                        with contextlib.suppress(NotFound):
                            client.return_ticket(ticket.ticket, "lost_lineage")

    def stop(self) -> None:
        self._stopped.set()
        self.join(JOIN_TIMEOUT_S)


@contextlib.contextmanager
def producing(url: str, run: str, group_of: Callable[[Ticket, int], Group] = numbered_group) -> Iterator[None]:
    """Append groups to a run as long as the context lasts."""
    producer = TicketProducer(url, run, group_of)
    producer.start()
    try:
        yield
    finally:
        producer.stop()
