"""Brings a run to rest after the faults, and looks at it closely, before and after a last restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from replaybuf.client import Client, Waiting
from replaybuf.service.answers import group_counts
from replaybuf.service.journal import Journal
from replaybuf.store import Store
from tests.chaos.calling import TIMEOUT_S, observed
from tests.chaos.content import checksum, make_group
from tests.chaos.history import (
    OK,
    Attached,
    BatchAsked,
    Drained,
    Folded,
    GroupSent,
    PayloadRead,
    Recorder,
    StateSeen,
    TicketsTaken,
    now_s,
)
from tests.chaos.trainer import read_body

T = TypeVar("T")

DRAIN_TIMEOUT_S = 45.0
RETRY_FOR_S = 30.0
PAYLOADS_READ = 200
WORLD = 2
POLL_S = 0.2


class Rest:
    """One run on its way to rest. Trainers still go on while `drain` works."""

    def __init__(self, url: str, run: str, recorder: Recorder) -> None:
        self._run, self._recorder = run, recorder
        self._client = Client(url, run, timeout_s=TIMEOUT_S, retry_for_s=RETRY_FOR_S)
        self._epoch = 0

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def drain(self) -> None:
        """Take every prompt that is due again and append its group, until there is none.

        Prompts due again are issued first. So where no ticket is out and the next one is a first attempt, every prompt
        before it has come to its end.
        """
        ends_s = now_s() + DRAIN_TIMEOUT_S
        ended = False
        while not ended and now_s() < ends_s:
            ended = not self._tickets_out() and self._take_first_attempt()
            if not ended:
                time.sleep(POLL_S)
        while self._tickets_out() and now_s() < ends_s:
            time.sleep(POLL_S)
        stood = "" if ended else str(self._client.get_run())
        self._recorder.write(Drained(at_s=now_s(), run=self._run, drained=ended, stood=stood))

    def _tickets_out(self) -> bool:
        return bool(self._client.get_run()["tickets"]["out"])

    def _take_first_attempt(self) -> bool:
        """Take a few tickets and append their groups; say whether one was of a prompt never issued before."""
        client = self._client
        taken = observed(self._run, client, lambda: client.take_tickets("rest", 4, wait_ms=500))
        tickets = taken.result.tickets if taken.result else []
        told = [(ticket.ticket, ticket.prompt_index, ticket.attempt) for ticket in tickets]
        waiting = msgspec.to_builtins(taken.result.waiting) if taken.result else None
        self._recorder.write(TicketsTaken(**taken.seen, tickets=told, waiting=waiting))
        stored = True
        for ticket in tickets:
            name = f"p{ticket.prompt_index}"
            version = taken.result.published_version if taken.result else 0
            group = make_group(name, version, named=False, ticket=ticket.ticket)
            sent = observed(self._run, client, lambda group=group: client.append([group]))  # type: ignore[misc]
            result = sent.result[0] if sent.result else None
            sent.seen["outcome"] = result.status if result else sent.seen["outcome"]
            stored &= sent.seen["outcome"] in ("stored", "duplicate")
            reason = result.reason if result else None
            event = GroupSent(
                **sent.seen, group_id=name, prompt_index=ticket.prompt_index, policy_version=version, reason=reason
            )
            self._recorder.write(event)
        return stored and any(ticket.attempt == 1 for ticket in tickets)

    # ------------------------------------------------------------------ looking

    def attach(self) -> None:
        """Become the trainer where the run stands, to ask for a batch before and after the restart."""
        client = self._client
        done = self._until_answered(lambda: client.attach(WORLD))
        self._epoch = done.epoch
        self._recorder.write(
            Attached(
                at_s=now_s(),
                run=self._run,
                sent_s=now_s(),
                server=client.address,
                resume_step=None,
                on_resume="redeliver",
                world=WORLD,
                epoch=done.epoch,
                step=done.step,
                generation=done.generation,
            )
        )

    def look(self, moment: str) -> None:
        """Write down the state, and the newest batch that is still kept."""
        client = self._client
        seen = observed(self._run, client, client.get_run)
        if seen.result is None:
            raise RuntimeError(f"run {self._run} has no state at rest: {seen.seen}")
        self._recorder.write(StateSeen(**seen.seen, state=seen.result, moment=moment))
        step = seen.result["step"] - 1
        if step < seen.result["oldest_step"]:
            return
        for rank in range(WORLD):
            asked = observed(self._run, client, lambda rank=rank: client.fetch_batch(step, self._epoch, rank))  # type: ignore[misc]
            body = None if asked.result is None or isinstance(asked.result, Waiting) else read_body(asked.result)
            waiting = msgspec.to_builtins(asked.result) if isinstance(asked.result, Waiting) else None
            self._recorder.write(
                BatchAsked(
                    **asked.seen, epoch=self._epoch, step=step, rank=rank, world=WORLD, body=body, waiting=waiting
                )
            )

    def read_payloads(self) -> None:
        """Read groups that may still be needed, some of each kind."""
        for state in ("live", "in_batches"):
            for listed in self._client.list_groups(state, PAYLOADS_READ)["groups"]:
                group = self._client.get_group(listed["group_id"])
                rollouts = group["rollouts"]
                sums = rollouts and [checksum(one["prompt_ids"] + one["completion_ids"]) for one in rollouts]
                self._recorder.write(
                    PayloadRead(
                        at_s=now_s(),
                        run=self._run,
                        group_id=listed["group_id"],
                        prompt_id=listed["prompt_id"],
                        rollouts=sums,
                    )
                )

    def _until_answered(self, call: Callable[[], T]) -> T:
        ends_s = now_s() + RETRY_FOR_S
        while True:
            done = observed(self._run, self._client, call)
            if done.result is not None:
                return done.result
            if now_s() > ends_s or done.seen["outcome"] == OK:
                raise RuntimeError(f"run {self._run} does not come to rest: {done.seen}")
            time.sleep(POLL_S)


async def fold(redis_url: str, run: str) -> Folded:
    """Fold the streams anew, without any service."""
    store = await Store.open(redis_url)
    try:
        journal = Journal(run, store, now_s)
        await journal.load()
        return Folded(at_s=now_s(), run=run, groups=group_counts(journal.state))
    finally:
        await store.close()
