"""A real run at scripted speeds: a real service is asked by HTTP, but nobody sleeps.

What takes time, generating and training, is an event in a queue; between two events the service's clock is put forward.
A caller that has to wait asks again after every change, like a long poll. So the run is the same on a
slow machine and on a busy one.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable

from replaybuf.client.client import Client
from replaybuf.lab.simulate.workload import Supply
from replaybuf.wire.contract import Ticket, WaitingAnswer
from tests.builders import group_of_lengths


@dataclasses.dataclass
class MeasuredRates:
    """What the scripted trainer saw: seconds in all, seconds it waited."""

    seconds: float = 0.0
    waited_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """Waited over all."""
        return self.waited_s / self.seconds


class Play:
    """One run: slots that generate and a trainer. `put_forward` advances the service's clock, which is stopped."""

    def __init__(self, client: Client, supply: Supply, steps: int, put_forward: Callable[[float], None]) -> None:
        self._client = client
        self._supply = supply
        self._steps = steps
        self._put_forward = put_forward
        self._forward_s = 0.0
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._free = supply.workload.slots
        self._generating: list[tuple[float, Callable[[], None]]] = []
        self._epoch = 0
        self._step = 0
        self._asked_s: float | None = None
        self.measured = MeasuredRates()

    def run(self) -> MeasuredRates:
        """Train all steps while all slots generate."""
        self._epoch = self._client.attach(dp_world_size=1).epoch
        self._asked_s = 0.0
        self._client.send_heartbeat("scripted", slots=self._supply.workload.slots)
        self._ask()
        while self._step < self._steps:
            self._next()()
            self._ask()
        self.measured.seconds = self._now_s
        return self.measured

    def _next(self) -> Callable[[], None]:
        """Advance to what happens next, and return it: groups that generate are slower the more of them do."""
        w = self._supply.workload
        factor = 1 - w.load_share * (1 - len(self._generating) / w.slots)
        work_s, generated = min(self._generating, key=lambda each: each[0], default=(math.inf, None))
        happens_s = self._now_s + work_s * factor
        if generated is None or (self._events and self._events[0][0] < happens_s):
            happens_s, _, happens = heapq.heappop(self._events)
        else:
            self._generating.remove((work_s, generated))
            happens = generated
        done_s = (happens_s - self._now_s) / factor
        self._generating = [(left_s - done_s, then) for left_s, then in self._generating]
        self._now_s = happens_s
        self._set_clock()
        return happens

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + seconds, next(self._order), happens))

    def _set_clock(self) -> None:
        """Make the service's time the run's."""
        self._put_forward(self._now_s - self._forward_s)
        self._forward_s = self._now_s

    def _ask(self) -> None:
        """Let everybody ask who waits: a batch that leaves may make room for tickets."""
        self._ask_for_batch()
        if self._free:
            taken = self._client.take_tickets("scripted", self._free)
            self._free -= len(taken.tickets)
            for ticket in taken.tickets:
                self._generate(ticket, taken.published_version)

    def _generate(self, ticket: Ticket, version: int) -> None:
        attempt = self._supply.attempt(ticket.prompt_index, ticket.attempt)
        lengths = self._supply.lengths(ticket.prompt_index, ticket.attempt).tolist()
        group = group_of_lengths(
            lengths, ticket=ticket.ticket, prompt_index=ticket.prompt_index, policy_version=version, group_id=None
        )

        def arrives() -> None:
            self._free += 1
            if attempt.fate == "stored":
                self._client.append([group])
            else:
                self._client.return_ticket(ticket.ticket, attempt.fate)

        work_s = attempt.duration_s - attempt.reward_s
        self._generating.append((work_s, lambda: self._after(attempt.reward_s, arrives)))

    def _ask_for_batch(self) -> None:
        """The order of a trainer's step, with the reference trainer's prefetch: asked once, as training starts."""
        if self._asked_s is None or isinstance(self._client.fetch_batch(self._step, self._epoch), WaitingAnswer):
            return
        w = self._supply.workload
        self.measured.waited_s += self._now_s - self._asked_s
        self._asked_s = None
        if w.prefetch and self._step + 1 < self._steps:
            self._client.fetch_batch(self._step + 1, self._epoch)
        self._after(w.train_s, self._trained)

    def _trained(self) -> None:
        w = self._supply.workload
        self._client.ack(self._step, self._epoch)
        self._step += 1
        if self._step % w.checkpoint_steps == 0:
            self._client.checkpoint(self._step, self._epoch)
        self._after(w.publish_s, self._published)

    def _published(self) -> None:
        self._client.publish_policy(self._step, self._epoch)
        self._asked_s = self._now_s
