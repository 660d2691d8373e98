"""Producer that uses every call of the contract, also wrongly: `python -m tests.chaos.producer`.

Takes several tickets at once, lets some expire and sends their group late, gives some back, sends groups again, names
some itself, appends without a ticket, by frames and by JSON. Ends on SIGTERM.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec

from replaybuf.client.client import Client
from replaybuf.client.replies import from_problem
from replaybuf.kernel.state.tickets import prompt_key
from replaybuf.wire.contract import AppendResult
from replaybuf.wire.group import Group, group_to_json
from tests.chaos.calling import TIMEOUT_S, observed, run_threads, stop_event
from tests.chaos.content import make_group
from tests.chaos.history import UNAVAILABLE, GroupSent, Recorder, TicketReturned, TicketsTaken, now_s
from tests.chaos.runs import policies_of

WORKERS = 2
"""Threads per run, sharing one client."""
RETRY_FOR_S = 8.0
KEPT_GROUPS = 64
"""Answered groups that may be sent again."""


class _Sent(msgspec.Struct):
    """A group on its way: its effective name, and when it may go."""

    name: str
    group: Group
    prompt_index: int | None
    due_s: float = 0.0


class Producer:
    """Feeds one run from one thread; `_late` groups are sent later, `_answered` ones may be sent again."""

    def __init__(
        self,
        url: str,
        run: str,
        name: str,
        recorder: Recorder,
        rng: random.Random,
        ttl_s: float,
        policies: Sequence[str] = ("",),
    ) -> None:
        self._client = Client(url, run, timeout_s=TIMEOUT_S, retry_for_s=RETRY_FOR_S)
        self._run, self._name, self._recorder, self._rng, self._ttl_s = run, name, recorder, rng, ttl_s
        self._policies = policies
        self._late: list[_Sent] = []
        self._answered: deque[_Sent] = deque(maxlen=KEPT_GROUPS)
        self._count = itertools.count()

    def work(self, stopping: threading.Event) -> None:
        """Produce until `stopping` is set."""
        while not stopping.is_set():
            groups = self._from_tickets() + self._without_tickets()
            now = now_s()
            groups += [sent for sent in self._late if sent.due_s <= now]
            self._late = [sent for sent in self._late if sent.due_s > now]
            if self._answered and self._rng.random() < 0.2:
                groups.append(self._rng.choice(self._answered))
            stopping.wait(self._rng.uniform(0.01, 0.04))  # generating
            if groups and self._rng.random() < 0.25:
                self._append_json(groups.pop())
            if groups:
                self._append(groups)
        self._client.close()

    # ------------------------------------------------------------------ groups

    def _from_tickets(self) -> list[_Sent]:
        count, adapter = self._rng.randint(1, 4), self._rng.choice(self._policies)
        taken = observed(
            self._run, self._client, lambda: self._client.take_tickets(self._name, count, adapter, wait_ms=200)
        )
        if taken.result is None:
            self._recorder.write(TicketsTaken(**taken.seen, adapter=adapter))
            time.sleep(0.2)
            return []
        tickets = taken.result.tickets
        waiting = msgspec.to_builtins(taken.result.waiting)
        issued = [(ticket.ticket, ticket.prompt_index, ticket.attempt) for ticket in tickets]
        self._recorder.write(TicketsTaken(**taken.seen, adapter=adapter, tickets=issued, waiting=waiting))
        made = []
        for ticket in tickets:
            fate = self._rng.random()
            if fate < 0.06:
                self._give_back(ticket.ticket)
                continue
            named = self._rng.random() < 0.1
            name = self._own_name() if named else prompt_key(adapter, ticket.prompt_index)
            version = max(0, taken.result.published_version - self._rng.choice((0, 0, 0, 1)))
            group = make_group(name, version, named=named, ticket=ticket.ticket, adapter=adapter)
            sent = _Sent(name, group, ticket.prompt_index)
            if fate < 0.12:  # too late: the ticket is out again by then
                sent.due_s = now_s() + self._ttl_s * self._rng.uniform(1.0, 2.5)
                self._late.append(sent)
            else:
                made.append(sent)
        return made

    def _without_tickets(self) -> list[_Sent]:
        if not self._answered or self._rng.random() > 0.05:
            return []
        name, last = self._own_name(), self._answered[-1].group
        return [_Sent(name, make_group(name, last.policy_version, named=True, adapter=last.adapter), None)]

    def _own_name(self) -> str:
        return f"{self._name}-{os.getpid()}-{id(self) % 9973}-{next(self._count)}"

    def _give_back(self, ticket: str) -> None:
        returned = observed(self._run, self._client, lambda: self._client.return_ticket(ticket, "chaos"))
        self._recorder.write(TicketReturned(**returned.seen, ticket=ticket))

    # ------------------------------------------------------------------ append

    def _append(self, groups: list[_Sent]) -> None:
        done = observed(self._run, self._client, lambda: self._client.append([sent.group for sent in groups]))
        if done.result is None:
            for sent in groups:
                self._record(sent, done.seen, None)
            return
        for sent, result in zip(groups, done.result, strict=True):
            self._record(sent, done.seen, result)

    def _append_json(self, sent: _Sent) -> None:
        """Append one group as JSON, which the client library never does."""
        wire = msgspec.json.encode(group_to_json(sent.group))

        def post() -> AppendResult:
            url = f"{self._client.address}/v1/runs/{self._run}/groups"
            try:
                reply = httpx.post(url, content=wire, headers={"content-type": "application/json"}, timeout=TIMEOUT_S)
                document = msgspec.json.decode(reply.content)
            except (httpx.TransportError, msgspec.DecodeError) as error:
                raise from_problem(503, {"detail": str(error)}) from error
            if "results" not in document:
                raise from_problem(reply.status_code, document)
            return msgspec.convert(document["results"][0], AppendResult)

        done = observed(self._run, self._client, post)
        self._record(sent, done.seen, done.result)

    def _record(self, sent: _Sent, seen: dict[str, object], result: AppendResult | None) -> None:
        outcome = str(seen["outcome"]) if result is None else result.status
        self._recorder.write(
            GroupSent(
                **(seen | {"outcome": outcome}),  # type: ignore[arg-type]
                group_id=sent.name,
                prompt_index=sent.prompt_index,
                policy_version=sent.group.policy_version,
                adapter=sent.group.adapter,
                reason=result.reason if result else None,
            )
        )
        if outcome in ("stored", "duplicate"):
            self._answered.append(sent)
        elif outcome in UNAVAILABLE:  # a producer keeps the group and sends it again
            sent.due_s = now_s() + self._rng.uniform(0.0, 1.0)
            self._late.append(sent)
        elif sent.group.ticket and self._rng.random() < 0.5:
            self._give_back(sent.group.ticket)


def main() -> None:
    """Read the command line and produce for every run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True, nargs="+")
    parser.add_argument("--name", required=True)
    parser.add_argument("--history", required=True, type=Path)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--ttl-s", required=True, type=float)
    parser.add_argument("--adapters", type=int, default=0)
    options = parser.parse_args()
    stopping = stop_event()
    recorder = Recorder(options.history, options.name)
    threads = []
    for run, worker in itertools.product(options.run, range(WORKERS)):
        rng = random.Random(f"{options.seed} {options.name} {os.getpid()} {run} {worker}")
        producer = Producer(
            options.url, run, options.name, recorder, rng, options.ttl_s, policies_of(run, options.adapters)
        )
        threads.append(threading.Thread(target=producer.work, args=(stopping,)))
    run_threads(threads)
    recorder.close()


if __name__ == "__main__":
    main()
