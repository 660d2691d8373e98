"""One run as the leader serves it: every decision, written to the ledger before it is answered.

Life: `Run.load` (fold of both streams) -> decisions -> `close` (wakes every waiter).

- A decision holds `_deciding`, judges the state, appends one ledger record, applies it. If the append's outcome is not
  known (connection lost), the next decision first reads the ledger's end: what was written counts, what was not did not
  happen.
- `pull` takes in groups from the index stream, whoever wrote them.
- Whoever waits (a trainer for a batch, a producer for a ticket) waits on `_changed`, one condition for all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from replaybuf.advantages import advantages
from replaybuf.config import ConfigPatch, RunConfig, check_run_config, differing_fields
from replaybuf.errors import (
    Conflict,
    Fenced,
    Gone,
    GroupRejected,
    Invalid,
    InvalidGroups,
    NoRoom,
    NotFound,
    ReplaybufError,
    RunFinished,
    ServiceUnavailable,
    StrategyFault,
    TooLarge,
    WrongStep,
)
from replaybuf.flow import TicketBook, TicketChange, parse_ticket, prompt_key
from replaybuf.frame import encode_frame, stored_checksum
from replaybuf.group import Admissible, Group, check_group, truncate
from replaybuf.index import DEAD, LIVE, Numbers
from replaybuf.ledger import (
    AckRecord,
    AnyRecord,
    AttachRecord,
    BatchRecord,
    CheckpointRecord,
    ConfigRecord,
    DeadLetterRecord,
    EvictRecord,
    PolicyRecord,
    PurgeRecord,
    RewindRecord,
    TicketRecord,
)
from replaybuf.packing import MAX_RANKS
from replaybuf.plugins import build_strategy
from replaybuf.service import answers
from replaybuf.service.answers import Amount, WaitingAnswer
from replaybuf.service.assembly import Assembled, assemble, digest_of, entry_in_batch, load, write_body
from replaybuf.state import RunState
from replaybuf.store import Store
from replaybuf.store.redis import ToAppend, decode_strings
from replaybuf.strategy import Budget, BufferView, Evictions, Feedback, Flow, Groups, Selection, Strategy, Waiting

log = logging.getLogger(__name__)

T = TypeVar("T")

PRODUCER_SILENCE_S = 60.0
LARGEST_WAIT_S = 60.0
KEPT_BATCHES = 3
_TOKENS_PER_GROUP_SAMPLE = 256


class AttachRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a trainer attaches: its ranks, the step it resumes at (None = where the run stands), its row layout."""

    dp_world_size: int = 1
    resume_step: int | None = None
    on_resume: str = "redeliver"
    seq_len: int | None = None
    pad_to_multiple_of: int | None = None


class Incoming(msgspec.Struct, frozen=True):
    """One group at the door: its columns and the frame it came in (None = it came as JSON), or why it failed."""

    group: Group | None
    frame: bytes | None = None
    rejection: GroupRejected | None = None


class Run:
    """The decisions of one run; see the module docstring."""

    def __init__(self, name: str, store: Store, token: str, clock: Callable[[], float] = time.time) -> None:
        self.name = name
        self.state = RunState()
        self.durability = "strict"
        self.rejected: Counter[str] = Counter()
        self.duplicates = 0
        self.truncated = 0
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.book = TicketBook(1.0, 1, None)
        self.strategy: Strategy[Any]
        self.store = store
        self.token = token
        self._clock = clock
        self._deciding = asyncio.Lock()
        self._pulling = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._changes = 0
        self._unsure = False
        self._closed = False
        self._last_asked_s = -float("inf")
        self._waiting_since: tuple[str, float] | None = None
        self._ready: OrderedDict[int, Assembled] = OrderedDict()
        self._to_free: list[Numbers] = []
        self._freed_through = 0

    # ------------------------------------------------------------------ life

    @classmethod
    async def create(cls, name: str, store: Store, token: str, config: RunConfig, clock: Callable[[], float]) -> Run:
        """Write the first ledger record of a new run. Raises `Invalid` for a configuration that cannot work."""
        run = cls(name, store, token, clock)
        resolved, strategy = resolve_config(config)
        await store.add_run(name)
        await run._append(ConfigRecord(config=msgspec.to_builtins(resolved), max_uses=strategy.max_uses, at_s=clock()))
        run._configured()
        return run

    @classmethod
    async def load(cls, name: str, store: Store, token: str, clock: Callable[[], float]) -> Run | None:
        """Rebuild a run from its streams; None where its ledger is empty (a creation that never finished)."""
        run = cls(name, store, token, clock)
        counts = await store.counts(name)
        run._freed_through = counts.get("freed_through", 0)
        async for numbers, values, _ in store.read_index(name, 0):
            run.state.store(numbers, values)
        await run._catch_up()
        if run.state.config is None:
            return None
        run.rejected.update({k.removeprefix("rejected:"): v for k, v in counts.items() if k.startswith("rejected:")})
        run._configured()
        run.book.restore(await store.tickets(name), counts)
        await run._strike_stored_tickets()
        return run

    async def close(self) -> None:
        """Wake every waiter; each is answered with what it waits for."""
        self._closed = True
        await self._notify()

    # ------------------------------------------------------------------ groups

    async def append(self, incoming: Sequence[Incoming]) -> list[dict[str, Any]]:
        """Store groups; one result each. Raises `TooLarge`, `InvalidGroups` where none could enter, `NoRoom`."""
        results: list[dict[str, Any]] = [{} for _ in incoming]
        ready: list[tuple[int, ToAppend]] = []
        for position, item in enumerate(incoming):
            try:
                ready.append((position, self._admit(item)))
            except GroupRejected as rejection:
                group_id = item.group.group_id if item.group else None
                results[position] = {
                    "group_id": group_id,
                    "status": "rejected",
                    "reason": rejection.reason,
                    "detail": rejection.detail,
                }
        self._check_room([item for _, item in ready])
        await self._count_rejected([result["reason"] for result in results if result])
        appended = await self.store.append(
            self.name, [item for _, item in ready], self.state.published[""], self._clock()
        )
        for (position, _), outcome in zip(ready, appended, strict=True):
            results[position] = {
                "group_id": outcome.group_id,
                "status": "stored" if outcome.stored else "duplicate",
            }
        if ready:
            await self.pull()
            duplicates = [item.group for (_, item), outcome in zip(ready, appended, strict=True) if not outcome.stored]
            self.duplicates += len(duplicates)
        else:
            self._refuse_all(results)
        return results

    def _admit(self, item: Incoming) -> ToAppend:
        """Judge one group at the door and make it ready to be stored."""
        if item.rejection or item.group is None:
            raise item.rejection or GroupRejected("malformed", "the group does not decode")
        config = self._config
        group, frame = item.group, item.frame
        group_id, key, group = self._identify(group)
        if config.batch.overlong == "truncate":
            cut = truncate(group, config.batch.seq_len)
            self.truncated += cut is not group
            group, frame = cut, frame if cut is group else None
        rejection = check_group(group, self.bounds)
        if rejection:
            raise GroupRejected(rejection.reason, rejection.detail)
        if group.advantages is None:
            group = dataclasses.replace(group, advantages=advantages(config.advantage, group.rewards))
            frame = None
        encoded = frame if frame is not None else encode_frame(group)
        if len(encoded) > config.limits.max_group_bytes:
            raise GroupRejected(
                "too_large",
                f"the group has {len(encoded)} bytes; limits.max_group_bytes is {config.limits.max_group_bytes}",
                name="group",
                value=len(encoded),
                bound=config.limits.max_group_bytes,
            )
        return ToAppend(group, group_id, key, encoded, stored_checksum(encoded))

    def _identify(self, group: Group) -> tuple[str, str, Group]:
        """Find the id of a group, and the prompt it stands for where it has a ticket."""
        if group.ticket is None:
            if not group.group_id:
                raise GroupRejected("missing_group_id", "group_id is missing; a group without a ticket needs one")
            return group.group_id, "", group
        try:
            ticket = parse_ticket(group.ticket)
        except NotFound as error:
            raise GroupRejected("unknown_ticket", error.detail) from None
        if ticket.adapter != group.adapter or ticket.prompt_index >= self.book.next_index.get(ticket.adapter, 0):
            raise GroupRejected(
                "unknown_ticket", f"ticket {group.ticket!r} was not issued for adapter {group.adapter!r}"
            )
        if group.prompt_index not in (None, ticket.prompt_index):
            raise GroupRejected(
                "wrong_prompt_index",
                f"prompt_index is {group.prompt_index}; ticket {group.ticket} is for {ticket.prompt_index}",
            )
        lost_from = self.state.lost_version_since(ticket.generation)
        if lost_from is not None and group.policy_version_max > lost_from:
            raise GroupRejected(
                "lost_lineage",
                f"the newest policy version is {group.policy_version_max}; after the ticket was issued a rewind "
                f"went back to version {lost_from}",
            )
        key = prompt_key(ticket.adapter, ticket.prompt_index)
        return group.group_id or key, key, dataclasses.replace(group, prompt_index=ticket.prompt_index)

    def _check_room(self, items: Sequence[ToAppend]) -> None:
        limit = self._config.limits.max_tokens_live
        free = [item for item in items if not item.prompt_key]  # a ticket was given room when it was issued
        if limit is None or not free:
            return
        live = self.state.live_tokens()
        coming = sum(item.group.tokens for item in free)
        if live + coming > limit:
            raise NoRoom(
                f"{live} tokens are live and {coming} would come; limits.max_tokens_live is {limit}",
                name="max_tokens_live",
                value=live + coming,
                bound=limit,
            )

    async def _count_rejected(self, reasons: list[str]) -> None:
        if reasons:
            counted = Counter(reasons)
            self.rejected.update(counted)
            await self.store.count(self.name, {f"rejected:{reason}": n for reason, n in counted.items()})

    def _refuse_all(self, results: list[dict[str, Any]]) -> None:
        if not results:
            raise Invalid("groups is empty; at least one group is needed", name="groups", value=0, bound=1)
        first = results[0]
        if all(result["reason"] == "too_large" for result in results):
            raise TooLarge(first["detail"], name="group", bound=self._config.limits.max_group_bytes)
        raise InvalidGroups(
            f"all {len(results)} groups were rejected; the first: {first['reason']}: {first['detail']}",
            results,
            name="groups",
            value=first["reason"],
        )

    @property
    def bounds(self) -> Admissible:
        """What groups are checked against at the door."""
        config = self._config
        return Admissible(
            published_version=self.state.published[""],
            adapters=frozenset(config.adapters),
            group_size=config.group_size,
            vocab_size=config.vocab_size,
            seq_len=config.batch.seq_len,
            tokens_per_batch=config.batch.tokens_per_batch,
        )

    async def pull(self) -> None:
        """Take in what is new in the index stream."""
        taken = False
        async with self._pulling:
            async for numbers, values, strings in self.store.read_index(self.name, self.state.stored):
                self.state.store(numbers, values)
                taken = True
                decoded = [decode_strings(raw) for raw in strings]
                await self.store.adopt([entry.payload_key for entry in decoded])
                indexes = values["prompt_index"].tolist()
                await self._strike([(e.adapter, i) for e, i in zip(decoded, indexes, strict=True) if i >= 0])
                await self._evict_arrivals(numbers)
        if taken:
            await self._notify()

    # ------------------------------------------------------------------ tickets

    async def take_tickets(self, producer: str, count: int, adapter: str, wait_s: float) -> dict[str, Any]:
        """Issue up to `count` tickets, waiting up to `wait_s` for the first; none are told why."""
        if count < 1:
            raise Invalid(f"count is {count}; at least 1 is needed", name="count", value=count, bound=1)
        if adapter and adapter not in self._config.adapters:
            raise Invalid(
                f"adapter is {adapter!r}; the run has {sorted(self._config.adapters)}", name="adapter", value=adapter
            )
        outcome = await self._until(lambda: self._issue(adapter, count), wait_s)
        now = self._clock()
        self._last_asked_s = now
        answer: dict[str, Any] = {"tickets": [], "published_version": self.state.published[adapter]}
        if isinstance(outcome, WaitingAnswer):
            return answer | {"waiting": outcome}
        log.debug("tickets issued run=%s producer=%s count=%d", self.name, producer, len(outcome.issued))
        answer["tickets"] = [
            {
                "ticket": str(ticket),
                "prompt_index": ticket.prompt_index,
                "attempt": ticket.attempt,
                "expires_in_s": self.book.ttl_s,
            }
            for ticket in outcome.issued
        ]
        return answer

    async def _issue(self, adapter: str, count: int) -> TicketChange | WaitingAnswer:
        self._last_asked_s = self._clock()
        async with self._decision():
            await self._expire()
            have = Amount(self.state.count(LIVE) + self.book.out, self.state.live_tokens())
            if self.state.state != "running":
                return answers.waiting(self.state.state, have, self._config)
            if self.book.used_up(adapter):
                blocked_on = "producers" if self.book.out else "nothing"
                return answers.waiting("finished", have, self._config, blocked_on=blocked_on)
            capacity = self._capacity()
            if capacity < 1:
                return answers.waiting("rate_limited", have, self._config, blocked_on="trainer")
            change = self.book.issue(adapter, min(count, capacity), self.state.generation, self._clock())
            await self._keep(change)
            return change

    async def return_ticket(self, text: str, reason: str) -> None:
        """Take a ticket back; after `max_attempts` its prompt is recorded as failed. Raises `NotFound`."""
        ticket = parse_ticket(text)
        async with self._decision():
            change = self.book.give_back(ticket)
            log.info("ticket returned run=%s ticket=%s reason=%s", self.name, text, reason)
            await self._keep(change, reason)
        await self._notify()

    async def tick(self) -> None:
        """Do what time alone brings about: expire tickets, end a run whose supply is used up."""
        deadline = self.book.next_deadline_s()
        if deadline is not None and deadline <= self._clock():
            async with self._decision():
                await self._expire()
            await self._notify()
        await self._end_if_used_up()

    async def _expire(self) -> None:
        change = self.book.expire(self._clock())
        if change:
            log.warning("tickets expired run=%s count=%d", self.name, change.counts["expired"])
            await self._keep(change, "expired")

    async def _keep(self, change: TicketChange, reason: str = "") -> None:
        # The ledger first: a prompt whose end is not recorded must still be in the set of tickets.
        for ticket in change.failed:
            record = TicketRecord(
                adapter=ticket.adapter,
                prompt_index=ticket.prompt_index,
                outcome="failed",
                attempts=ticket.attempt,
                reason=reason,
                at_s=self._clock(),
            )
            await self._append(record)
        if change:
            await self.store.change_tickets(
                self.name, self.token, drop=change.drop, deadlines_s=change.deadlines_s, counts=change.counts
            )

    async def _strike(self, prompts: Iterable[tuple[str, int]]) -> None:
        change = self.book.done(prompts)
        if change:
            await self.store.change_tickets(self.name, self.token, drop=change.drop)

    async def _strike_stored_tickets(self) -> None:
        prompts = self.book.prompts_at_hand()
        numbers = await self.store.numbers_of(self.name, [prompt_key(*prompt) for prompt in prompts])
        done = [p for p, n in zip(prompts, numbers, strict=True) if n is not None or p in self.state.failed_prompts]
        await self._strike(done)

    def _capacity(self) -> int:
        config = self._config
        flow = self._flow()
        capacity = self._ask_strategy("admit", lambda: self.strategy.admit(self._view(self.state.next_step), flow))
        if config.limits.max_tokens_live is not None:
            coming = self.book.out * flow.tokens_per_group
            room = config.limits.max_tokens_live - self.state.live_tokens() - coming
            capacity = min(capacity, int(room // flow.tokens_per_group))
        return capacity

    # ------------------------------------------------------------------ trainer

    async def attach(self, request: AttachRequest) -> dict[str, Any]:
        """Give the run to a trainer, fencing older epochs, and restore history to its step."""
        async with self._decision():
            state, config = self.state, self._config
            step = state.step if request.resume_step is None else request.resume_step
            layout = self._layout(request)
            if not state.oldest_step <= step <= state.step:
                raise WrongStep(
                    f"resume_step is {step}; steps {state.oldest_step} to {state.step} can be resumed "
                    f"(oldest kept checkpoint, next unacked step)",
                    name="resume_step",
                    value=step,
                    bound=[state.oldest_step, state.step],
                )
            redeliver = request.on_resume == "redeliver"
            if redeliver:
                self._check_rows_fit(step, layout.seq_len)
            epoch = state.epoch + 1
            # ATTACH first: should we die before REWIND, the older trainer is fenced and this one asks again.
            attached = msgspec.structs.replace(layout, epoch=epoch, step=step, at_s=self._clock())
            await self._append(attached)
            if step < state.step or (not redeliver and state.next_step > step):
                await self._append(
                    RewindRecord(
                        step=step,
                        generation=state.generation + 1,
                        on_resume="redeliver" if redeliver else "resample",
                        version=config.version_of(step),
                        until=state.stored,
                        at_s=self._clock(),
                    )
                )
            self._ready.clear()
            self._waiting_since = None
            await self._evict()
        await self._notify()
        log.info("trainer attached run=%s epoch=%d step=%d ranks=%d", self.name, epoch, step, request.dp_world_size)
        return {
            "epoch": epoch,
            "step": step,
            "generation": state.generation,
            "published_version": state.published[""],
            "dp_world_size": attached.dp_world_size,
            "seq_len": attached.seq_len,
            "pad_to_multiple_of": attached.pad_to_multiple_of,
            "look_ahead": self.strategy.look_ahead,
        }

    def _layout(self, request: AttachRequest) -> AttachRecord:
        batch = self._config.batch
        seq_len = request.seq_len or batch.seq_len
        multiple = request.pad_to_multiple_of or batch.pad_to_multiple_of
        checks = [
            ("dp_world_size", request.dp_world_size, 1 <= request.dp_world_size <= MAX_RANKS, f"1..{MAX_RANKS}"),
            ("seq_len", seq_len, seq_len >= 2, "at least 2"),
            ("pad_to_multiple_of", multiple, multiple >= 1 and seq_len % multiple == 0, f"a divisor of {seq_len}"),
            ("on_resume", request.on_resume, request.on_resume in ("redeliver", "resample"), "redeliver | resample"),
        ]
        for name, value, fits, bound in checks:
            if not fits:
                raise Invalid(f"{name} is {value!r}; it must be {bound}", name=name, value=value, bound=bound)
        return AttachRecord(
            epoch=0, step=0, dp_world_size=request.dp_world_size, seq_len=seq_len, pad_to_multiple_of=multiple
        )

    def _check_rows_fit(self, step: int, seq_len: int) -> None:
        if self._config.batch.overlong == "truncate":
            return
        for standing, batch in self.state.batches.items():
            longest = self.state.index["longest_tokens"][self.state.index.rows_of(batch.numbers)]
            if standing >= step and len(longest) and int(longest.max()) > seq_len:
                raise Conflict(
                    f"seq_len is {seq_len}; batch {standing}, to be redelivered, holds a rollout of "
                    f"{int(longest.max())} tokens",
                    name="seq_len",
                    value=seq_len,
                    bound=int(longest.max()),
                )

    async def batch(self, step: int, epoch: int, rank: int, wait_s: float) -> bytes | WaitingAnswer:
        """Return the body of `step` for one rank, or why there is none yet.

        Raises `Fenced`, `WrongStep`, `RunFinished`, `Gone`, and `Invalid` for a rank outside the world.
        """
        self._check_epoch(epoch)
        attached = self.state.attached
        if attached is None or not 0 <= rank < attached.dp_world_size:
            size = attached.dp_world_size if attached else 0
            raise Invalid(f"dp_rank is {rank}; dp_world_size is {size}", name="dp_rank", value=rank, bound=size)

        async def attempt() -> Assembled | WaitingAnswer:
            self._check_epoch(epoch)
            self._check_askable(step)
            outcome = await self._ready_batch(step)
            self._account_wait(outcome)
            return outcome

        outcome = await self._until(attempt, wait_s)
        if isinstance(outcome, WaitingAnswer):
            return outcome
        return await asyncio.to_thread(write_body, self.name, outcome, rank)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.state.epoch or epoch < 1:
            raise Fenced(
                f"epoch is {epoch}; the run is attached with epoch {self.state.epoch}",
                name="epoch",
                value=epoch,
                bound=self.state.epoch,
            )

    def _check_askable(self, step: int) -> None:
        state = self.state
        if step < 0 or step > state.step + max(1, self.strategy.look_ahead):
            raise WrongStep(
                f"step is {step}; the next unacked step is {state.step} and the strategy looks "
                f"{self.strategy.look_ahead} ahead",
                name="step",
                value=step,
                bound=state.step + self.strategy.look_ahead,
            )
        if step in state.batches:
            return
        max_steps = self._config.max_steps
        if state.state == "finished" or (max_steps is not None and step >= max_steps):
            raise RunFinished(
                f"run {self.name} is finished after {state.step} steps", name="step", value=step, bound=state.step
            )
        if step < state.step:
            raise Gone(
                f"the batch of step {step} was freed by a checkpoint; the oldest one kept is {state.oldest_step}",
                name="step",
                value=step,
                bound=state.oldest_step,
            )

    async def _ready_batch(self, step: int) -> Assembled | WaitingAnswer:
        if step > self.state.step + self.strategy.look_ahead:
            return self._explain("awaiting_ack")
        async with self._decision():
            while self.state.next_step <= step:
                waits = await self._assemble_next()
                if waits:
                    return waits
        await self._end_if_used_up()
        return await self._assembled(step)

    async def _assembled(self, step: int) -> Assembled:
        """Return a batch of the current history, fetched and packed again where it is not at hand."""
        if step in self._ready:
            return self._ready[step]
        record = await self._record_at(self.state.batches[step].entry)
        loaded = await load(self.store, self.name, [entry.number for entry in record.groups])
        return self._remember(record, loaded.groups)

    def _remember(self, record: BatchRecord, groups: dict[int, Group]) -> Assembled:
        attached = self.state.attached
        if attached is None:
            raise Conflict(f"run {self.name} has no trainer attached", name="epoch", value=0)
        batch = assemble(record, groups, attached)
        self._ready[record.step] = batch
        while len(self._ready) > KEPT_BATCHES:
            self._ready.popitem(last=False)
        return batch

    async def ack(self, step: int, epoch: int, feedback: dict[str, Any] | None) -> dict[str, Any]:
        """Count a step as trained. Raises `Fenced`, `WrongStep` out of order or for a step never served."""
        async with self._decision():
            self._check_epoch(epoch)
            state = self.state
            if step > state.step or (step == state.step and step not in state.batches) or step < 0:
                raise WrongStep(
                    f"step is {step}; the next step to ack is {state.step}"
                    + ("" if step != state.step else ", and its batch was never served"),
                    name="step",
                    value=step,
                    bound=state.step,
                )
            if step == state.step:
                await self._append(AckRecord(step=step, epoch=epoch, feedback=feedback, at_s=self._clock()))
                if feedback:
                    self._ask_strategy("observe", lambda: self.strategy.observe(Feedback(step, feedback)))
        await self._notify()
        await self._end_if_used_up()
        return {"step": step, "state": "acked"}

    async def publish(self, version: int, epoch: int, weights_uri: str | None, adapter: str) -> dict[str, Any]:
        """Record that the engines loaded a version. Raises `Fenced`, `Conflict` where it goes back or too far."""
        async with self._decision():
            self._check_epoch(epoch)
            if adapter not in self.state.published:
                raise Invalid(f"adapter is {adapter!r}; the run has none", name="adapter", value=adapter)
            published = self.state.published[adapter]
            newest = self._config.version_of(self.state.step)
            if version < published or version > newest:
                why = "versions only grow" if version < published else "ack the steps before it first"
                raise Conflict(
                    f"version is {version}; published is {published} and the next unacked step trains {newest}: {why}",
                    name="version",
                    value=version,
                    bound=[published, newest],
                )
            if version > published:
                record = PolicyRecord(
                    version=version, weights_uri=weights_uri, adapter=adapter, epoch=epoch, at_s=self._clock()
                )
                await self._append(record)
        await self._notify()
        return self.policy()

    def policy(self) -> dict[str, Any]:
        """Render the published policy."""
        versions = {name: version for name, version in self.state.published.items() if name}
        return {
            "version": self.state.published[""],
            "weights_uri": self.state.weights_uri[""],
            "adapters": versions,
            "generation": self.state.generation,
        }

    async def policy_after(self, after: int | None, wait_s: float) -> dict[str, Any]:
        """Return the policy once its version is above `after`, or when the wait is over."""

        async def attempt() -> dict[str, Any] | WaitingAnswer:
            if after is None or self.state.published[""] > after:
                return self.policy()
            return self._explain("awaiting_publication")

        outcome = await self._until(attempt, wait_s)
        return self.policy() if isinstance(outcome, WaitingAnswer) else outcome

    async def checkpoint(self, step: int, epoch: int, keep: int) -> dict[str, Any]:
        """Keep what the newest `keep` checkpoints may need; what is older may go."""
        async with self._decision():
            self._check_epoch(epoch)
            if keep < 1:
                raise Invalid(f"keep is {keep}; at least 1 is needed", name="keep", value=keep, bound=1)
            if not self.state.oldest_step <= step <= self.state.step:
                raise WrongStep(
                    f"step is {step}; checkpoints from {self.state.oldest_step} to {self.state.step} can be recorded",
                    name="step",
                    value=step,
                    bound=[self.state.oldest_step, self.state.step],
                )
            if sorted({*self.state.checkpoints, step})[-keep:] != self.state.checkpoints:
                await self._append(CheckpointRecord(step=step, keep=keep, at_s=self._clock()))
        await self._notify()
        return {"checkpoints": self.state.checkpoints, "oldest_step": self.state.oldest_step}

    # ------------------------------------------------------------------ operator

    async def patch(self, patch: ConfigPatch) -> None:
        """Change strategy, filters, limits or state while the run goes on. Raises `Conflict`, `Invalid`."""
        async with self._decision():
            state = self.state
            fields = {
                name: value for name in ("strategy", "filters", "limits") if (value := getattr(patch, name)) is not None
            }
            config, strategy = resolve_config(msgspec.structs.replace(self._config, **fields))
            self._check_standing_batches(strategy)
            wanted = patch.state or state.config_state
            if state.state == "finished" and wanted != "finished" and state.config_state != "finished":
                raise Conflict(
                    f"run {self.name} reached max_steps = {self._config.max_steps}; it cannot be {wanted}",
                    name="state",
                    value=wanted,
                    bound="finished",
                )
            reason = "operator" if patch.state else state.config_reason
            record = ConfigRecord(
                config=msgspec.to_builtins(config),
                max_uses=strategy.max_uses,
                state=wanted,  # type: ignore[arg-type]
                reason=None if wanted == "running" else reason,
                at_s=self._clock(),
            )
            await self._append(record)
            self._configured()
            await self._evict()
        await self._notify()

    def _check_standing_batches(self, strategy: Strategy[Any]) -> None:
        """Refuse bounds that a batch already handed out, and not yet acked, breaks."""
        for step, batch in self.state.batches.items():
            if batch.acked:
                continue
            rows = self.state.index.rows_of(batch.numbers)
            ages = self._config.version_of(step) - self.state.index["policy_version"][rows]
            for name, bound, found in (
                ("max_staleness", strategy.max_staleness, int(ages.max())),
                ("max_uses", strategy.max_uses, int(self.state.index["times_sampled"][rows].max())),
            ):
                if bound is not None and found > bound:
                    raise Conflict(
                        f"{name} would be {bound}; batch {step}, not yet acked, has {found}",
                        name=name,
                        value=bound,
                        bound=found,
                    )

    async def purge(self) -> int:
        """Let the bytes of all dead letters go; return how many."""
        async with self._decision():
            numbers = self.state.index["number"][self.state.index["state"] == DEAD].tolist()
            if numbers:
                await self._append(PurgeRecord(numbers=numbers, at_s=self._clock()))
        return len(numbers)

    def same_config(self, config: RunConfig) -> list[str]:
        """Name the fields in which `config` differs from the run's."""
        return differing_fields(self._config, resolve_config(config)[0])

    # ------------------------------------------------------------------ views

    async def describe(self) -> dict[str, Any]:
        """Render the state of the run."""
        return answers.run_state(
            self.name,
            self.state,
            self.book,
            msgspec.to_builtins(self._config),
            durability=self.durability,
            rejected=dict(self.rejected),
            waits=self._why_waiting(),
        )

    async def record(self, step: int, generation: int | None) -> dict[str, Any]:
        """Render the record of a batch. Raises `NotFound` where that history has no such step."""
        entry = self.state.batch_entry(step, generation)
        if entry is None:
            where = "the current history" if generation is None else f"generation {generation}"
            raise NotFound(f"{where} has no batch of step {step}", name="step", value=step, bound=self.state.next_step)
        record = await self._record_at(entry)
        voided = self.state.records.get(step) != entry
        standing = answers.standing_of(
            None if voided else self.state.batches.get(step), record.generation, voided, step, self.state.next_step
        )
        attached = self.state.attached
        ranks, seq_len = (attached.dp_world_size, attached.seq_len) if attached else (1, self._config.batch.seq_len)
        batch = self._ready.get(step)
        if not voided and batch is None and step in self.state.batches:
            batch = await self._assembled(step)
        at_hand = None if voided else batch
        return answers.batch_record(
            self.name,
            record,
            standing,
            at_hand.micro_batches if at_hand else 0,
            at_hand.padded_rows() if at_hand else [],
            ranks,
            seq_len,
        )

    async def ledger(self, after: int, limit: int) -> AsyncIterator[tuple[int, AnyRecord]]:
        """Read ledger records behind entry `after`."""
        async for chunk in self.store.read_ledger(self.name, after, limit):
            for entry in chunk:
                yield entry

    # ------------------------------------------------------------------ assembling

    async def _assemble_next(self) -> WaitingAnswer | None:
        """Make the batch of the next step, or say why not. Called with the decision lock held."""
        while True:
            waits = self._blocked()
            if waits:
                return waits
            step = self.state.next_step
            version = self._config.version_of(step)
            groups = self._usable(step)
            view = self._view(step, groups)
            seed = [self._config.seed, self.state.generation, step]
            chosen = self._select(groups, view, seed)
            if isinstance(chosen, Waiting):
                return self._explain(self._reason(groups, chosen.reason), groups)
            self._check_selection(chosen, groups, view.budget)
            numbers = chosen.rows.tolist()
            loaded = await load(self.store, self.name, numbers)
            if loaded.broken:
                await self._bury(loaded.broken)
                continue
            await self._write_batch(step, version, seed, chosen, loaded.entries, loaded.groups)
            await self._evict()
            return None

    async def _write_batch(
        self,
        step: int,
        version: int,
        seed: list[int],
        chosen: Selection,
        entries: Sequence[Any],
        groups: dict[int, Group],
    ) -> None:
        uses = self.state.index["times_sampled"][self.state.index.rows_of(np.sort(chosen.rows))]
        uses_of = dict(zip(np.sort(chosen.rows).tolist(), uses.tolist(), strict=True))
        weights = [None] * len(entries) if chosen.weights is None else chosen.weights.astype(float).tolist()
        held = [
            entry_in_batch(entry, version, uses_of[entry.number] + 1, weight)
            for entry, weight in zip(entries, weights, strict=True)
        ]
        digest = digest_of(entries, step, self.state.generation)
        record = BatchRecord(
            step=step,
            generation=self.state.generation,
            batch_id=f"{self.state.generation}-{step}-{digest[:8]}",
            digest=digest,
            version=version,
            strategy=self._config.strategy.name,
            options=self._config.strategy.options,
            seed=seed,
            tokens=sum(entry.tokens for entry in held),
            rollouts=sum(group.rollouts for group in groups.values()),
            groups=held,
            at_s=self._clock(),
        )
        await self._append(record)
        self._remember(record, groups)

    def _select(self, groups: Groups, view: BufferView, seed: list[int]) -> Selection | Waiting:
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        return self._ask_strategy("select", lambda: self.strategy.select(groups, view, view.budget, rng))

    def _blocked(self) -> WaitingAnswer | None:
        if self.state.state != "running":
            return self._explain(self.state.state)
        wanted = self._config.version_of(self.state.next_step)
        staleness = self.strategy.max_staleness
        if staleness is not None and self.state.published[""] < wanted - staleness:
            return self._explain("awaiting_publication")
        return None

    def _usable(self, step: int) -> Groups:
        """Return the live groups that the strategy's bounds and the trainer's rows allow at `step`."""
        index, rows = self.state.index, self.state.index.live()
        staleness = self._config.version_of(step) - index["policy_version"][rows]
        fits = staleness >= 0
        if self.strategy.max_staleness is not None:
            fits &= staleness <= self.strategy.max_staleness
        if self.strategy.max_uses is not None:
            fits &= index["times_sampled"][rows] < self.strategy.max_uses
        if self._config.batch.overlong == "reject":
            fits &= index["longest_tokens"][rows] <= self._seq_len
        return index.groups(rows[fits])

    def _check_selection(self, chosen: Selection, groups: Groups, budget: Budget) -> None:
        """Hold a strategy to its contract. Raises `StrategyFault` naming the strategy and the rule."""
        name = self._config.strategy.name
        rows = np.asarray(chosen.rows, np.int64)
        positions = np.searchsorted(groups.row, rows)
        positions = positions[positions < len(groups)]
        tokens = int(groups.tokens[positions].sum(dtype=np.int64))
        rules = [
            ("selects at least one group", len(rows) > 0, len(rows)),
            ("selects a group once", len(np.unique(rows)) == len(rows), len(rows)),
            ("selects only groups it was given", bool(np.isin(rows, groups.row).all()), rows[:8].tolist()),
            ("keeps the token budget", budget.tokens is None or tokens <= budget.tokens, tokens),
            ("keeps the group budget", budget.groups is None or len(rows) <= budget.groups, len(rows)),
            ("gives one weight per group", chosen.weights is None or len(chosen.weights) == len(rows), len(rows)),
        ]
        for rule, kept, value in rules:
            if not kept:
                raise StrategyFault(
                    f"strategy {name!r} broke the rule '{rule}' at step {self.state.next_step}: {value}",
                    name=name,
                    value=value,
                    bound=rule,
                )

    def _ask_strategy(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # a plug-in may raise anything; the run pauses with it, the service lives
            log.exception("strategy raised run=%s strategy=%s call=%s", self.name, self._config.strategy.name, what)
            raise StrategyFault(
                f"strategy {self._config.strategy.name!r} raised in {what}: {error!r}", name=what, value=repr(error)
            ) from error

    async def _pause(self, reason: str) -> None:
        log.error("run paused run=%s reason=%s", self.name, reason)
        await self._set_state("paused", reason)

    async def _set_state(self, state: str, reason: str) -> None:
        await self._append(
            ConfigRecord(
                config=msgspec.to_builtins(self._config),
                max_uses=self.state.max_uses,
                state=state,  # type: ignore[arg-type]
                reason=reason,
                at_s=self._clock(),
            )
        )
        await self._notify()

    async def _bury(self, broken: dict[int, str]) -> None:
        by_reason: dict[str, list[int]] = {}
        for number, reason in sorted(broken.items()):
            by_reason.setdefault(reason, []).append(number)
        log.error("groups are unusable run=%s numbers=%s", self.name, by_reason)
        await self._append(DeadLetterRecord(numbers=by_reason, at_s=self._clock()))

    async def _evict(self, only: Numbers | None = None) -> None:
        """Record which live groups no batch from the next step on can use. Called with the decision lock held."""
        by_reason = self._evictable(only)
        if by_reason:
            await self._append(EvictRecord(step=self.state.next_step, numbers=by_reason, at_s=self._clock()))

    def _evictable(self, only: Numbers | None) -> dict[str, list[int]]:
        index = self.state.index
        rows = index.live() if only is None else index.rows_of(only)
        rows = rows[index["state"][rows] == LIVE]
        by_reason: dict[str, list[int]] = {}
        if not len(rows):
            return by_reason
        groups = index.groups(rows)
        view = self._view(self.state.next_step)
        found: Evictions = self._ask_strategy("evict", lambda: self.strategy.evict(groups, view))
        for number, reason in zip(found.rows, found.reasons, strict=True):
            by_reason.setdefault(reason, []).append(int(number))
        if self._config.batch.overlong == "reject":
            longer = set(groups.row[index["longest_tokens"][rows] > self._seq_len].tolist()) - set(found.rows)
            if longer:
                by_reason["overlong"] = sorted(longer)
        return by_reason

    async def _evict_arrivals(self, numbers: Numbers) -> None:
        """Evict what arrived too late; the common case, nothing to evict, takes no lock."""
        if self._evictable(numbers):
            async with self._decision():
                await self._evict(numbers)

    # ------------------------------------------------------------------ explaining

    def _reason(self, groups: Groups, told: str) -> str:
        """Choose the first reason that holds when a strategy says it cannot fill a batch."""
        if told == "rate_limited":
            return told
        if len(groups):
            return told
        if self.state.evicted_since_batch:
            return "all_stale"
        if self.strategy.max_uses != 1 and self.state.count(LIVE):
            return "reuse_exhausted"
        silent = self._clock() - self._last_asked_s > PRODUCER_SILENCE_S
        return "no_producers" if silent and not self.book.out else "no_groups"

    def _explain(self, reason: str, groups: Groups | None = None) -> WaitingAnswer:
        usable = self._usable(self.state.next_step) if groups is None else groups
        have = Amount(len(usable), int(usable.tokens.sum(dtype=np.int64)))
        return answers.waiting(reason, have, self._config)

    def _why_waiting(self) -> WaitingAnswer | None:
        """Say why the next batch cannot be made now; None where it can, or where one stands ready."""
        blocked = self._blocked()
        if blocked:
            return blocked
        step = self.state.next_step
        if step > self.state.step + self.strategy.look_ahead:
            return self._explain("awaiting_ack")
        groups = self._usable(step)
        try:
            chosen = self._select(groups, self._view(step, groups), [self._config.seed, self.state.generation, step])
        except StrategyFault:
            return self._explain("paused", groups)
        return self._explain(self._reason(groups, chosen.reason), groups) if isinstance(chosen, Waiting) else None

    def _account_wait(self, outcome: object) -> None:
        """Book the time since the trainer was last told to wait under the reason it was told then."""
        now = self._clock()
        if self._waiting_since:
            reason, since_s = self._waiting_since
            self.waited_s[reason] += max(0.0, min(now - since_s, LARGEST_WAIT_S))
        self._waiting_since = (outcome.reason, now) if isinstance(outcome, WaitingAnswer) else None

    # ------------------------------------------------------------------ parts

    @property
    def _config(self) -> RunConfig:
        if self.state.config is None:
            raise NotFound(f"run {self.name} has no configuration yet", name="run", value=self.name)
        return self.state.config

    @property
    def _seq_len(self) -> int:
        return self.state.attached.seq_len if self.state.attached else self._config.batch.seq_len

    def _configured(self) -> None:
        """Build what depends on the configuration."""
        config = self._config
        self.strategy = build_strategy(config.strategy.name, config.strategy.options)
        self.book.ttl_s = config.tickets.ttl_s
        self.book.max_attempts = config.tickets.max_attempts
        self.book.prompts = config.tickets.prompts

    def _view(self, step: int, groups: Groups | None = None) -> BufferView:
        batch = self._config.batch
        live = self.state.count(LIVE) if groups is None else len(groups)
        tokens = self.state.live_tokens() if groups is None else int(groups.tokens.sum(dtype=np.int64))
        return BufferView(
            step=step,
            version=self._config.version_of(step),
            published_version=self.state.published[""],
            steps_per_publish=self._config.steps_per_publish,
            groups_live=live,
            tokens_live=tokens,
            tickets_out=self.book.out,
            budget=Budget(batch.tokens_per_batch, batch.groups_per_batch, self._seq_len),
            batches=tuple(len(self.state.batches[s].numbers) for s in sorted(self.state.batches)[-16:]),
        )

    def _flow(self) -> Flow:
        recent = self.state.index["tokens"][-_TOKENS_PER_GROUP_SAMPLE:]
        batch = self._config.batch
        if len(recent):
            mean = float(recent.mean())
        else:  # until the first groups arrive: half-full rollouts, and no more than the budget holds
            prior = (self._config.group_size or 8) * batch.seq_len / 2
            mean = min(prior, float(batch.tokens_per_batch or prior))
        return Flow(now_s=self._clock(), tokens_per_group=mean, max_tokens_live=self._config.limits.max_tokens_live)

    async def _end_if_used_up(self) -> None:
        """Finish a run whose prompt supply is used up, with no ticket out and too little for a batch."""
        state = self.state
        if state.state != "running" or not self.book.used_up("") or self.book.out:
            return
        blocked = self._why_waiting()
        if blocked is None or blocked.blocked_on != "producers":
            return
        async with self._decision():
            if state.state == "running" and self.book.used_up("") and not self.book.out:
                log.info("run finished run=%s reason=prompts step=%d", self.name, state.step)
                await self._set_state("finished", "prompts")

    # ------------------------------------------------------------------ ledger and waiting

    def _decision(self) -> _Decision:
        return _Decision(self)

    async def _append(self, record: AnyRecord) -> None:
        """Write one record, then apply it."""
        entry = self.state.entries + 1
        try:
            await self.store.append_record(self.name, self.token, entry, record)
        except (ServiceUnavailable, Conflict):
            self._unsure = True  # it may have been written, or somebody else's record was
            raise
        except asyncio.CancelledError:
            self._unsure = True
            raise
        self._apply(entry, record)

    def _apply(self, entry: int, record: AnyRecord) -> None:
        freed = self.state.apply(entry, record)
        if len(freed) and entry > self._freed_through:
            self._to_free.append(freed)

    async def _catch_up(self) -> None:
        async for chunk in self.store.read_ledger(self.name, self.state.entries):
            for entry, record in chunk:
                self._apply(entry, record)
        self._unsure = False

    async def _record_at(self, entry: int) -> BatchRecord:
        async for _, record in self.ledger(entry - 1, 1):
            if isinstance(record, BatchRecord):
                return record
        raise ReplaybufError(f"ledger entry {entry} of run {self.name} is not a batch", name="entry", value=entry)

    async def free_payloads(self) -> None:
        """Delete the payloads that checkpoints and purges let go."""
        while self._to_free:
            numbers = self._to_free[0].tolist()
            entries = await self.store.entries(self.name, numbers)
            await self.store.unlink([entry.strings.payload_key for entry in entries])
            self._to_free.pop(0)
        if self.state.entries > self._freed_through:
            await self.store.set_count(self.name, "freed_through", self.state.entries)
            self._freed_through = self.state.entries

    async def _until(self, attempt: Callable[[], Any], wait_s: float) -> Any:
        """Repeat `attempt` on every change until it gives something else than a waiting answer, or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(max(wait_s, 0.0), LARGEST_WAIT_S)
        while True:
            seen = self._changes
            try:
                outcome = await attempt()
            except StrategyFault:
                outcome = self._explain("paused")  # the decision that failed has paused the run
            left = deadline - loop.time()
            if not isinstance(outcome, WaitingAnswer) or left <= 0 or self._closed:
                return outcome
            await self._next_change(seen, left)

    async def _next_change(self, seen: int, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._changes != seen)
        except TimeoutError:
            pass  # the wait is over; the caller looks once more and answers

    async def _notify(self) -> None:
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()


class _Decision:
    """Hold the decision lock, with the ledger's end known."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def __aenter__(self) -> None:
        await self._run._deciding.acquire()
        try:
            if self._run._unsure:
                await self._run._catch_up()
                self._run._configured()
        except BaseException:
            self._run._deciding.release()
            raise

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if isinstance(error, StrategyFault) and self._run.state.config_state == "running":
                await self._run._pause(error.detail)
        finally:
            self._run._deciding.release()


def resolve_config(config: RunConfig) -> tuple[RunConfig, Strategy[Any]]:
    """Check a configuration and fill in the defaults of its strategy's options. Raises `Invalid`."""
    check_run_config(config)
    if config.filters:
        names = [spec.name for spec in config.filters]
        raise Invalid(f"filters is {names}; this release has no filters", name="filters", value=names, bound=[])
    advantages(config.advantage, np.zeros(1))
    strategy = build_strategy(config.strategy.name, config.strategy.options)
    spec = msgspec.structs.replace(config.strategy, options=msgspec.to_builtins(strategy.options))
    return msgspec.structs.replace(config, strategy=spec), strategy
