"""One run as its leader serves it: the parts, wired; life, operator calls, what time brings about.

Life: `Run.create`, or `Run.load` (fold of both streams) and, once the lease is ours, `lead` -> requests and `tick` ->
`close` (wakes every waiter).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from replaybuf.errors import Conflict
from replaybuf.kernel.plugin_set import resolve_config
from replaybuf.kernel.plugins import Bounds
from replaybuf.kernel.rates import MeasuredRates, Rates
from replaybuf.kernel.selection import Selector
from replaybuf.kernel.state import RunState
from replaybuf.kernel.tickets import TicketBook
from replaybuf.service.run.admission import AdmissionCheck
from replaybuf.service.run.appends import Appends
from replaybuf.service.run.arrivals import Arrivals
from replaybuf.service.run.batches import Batches
from replaybuf.service.run.eviction import Eviction
from replaybuf.service.run.history_lock import HistoryLock
from replaybuf.service.run.journal import Journal
from replaybuf.service.run.lease import Lease
from replaybuf.service.run.session import Session
from replaybuf.service.run.side_state import SideState
from replaybuf.service.run.state_cache import StateCache
from replaybuf.service.run.tickets import Tickets
from replaybuf.service.run.trimming import Trimming
from replaybuf.store import RunTickets, Store
from replaybuf.wire.config import ConfigPatch, RunConfig, StrategySpec, differing_fields
from replaybuf.wire.ledger import ConfigRecord, PurgeRecord


class Run:
    """One run: `appends` stores groups, `tickets` admits them, `batches` serves them, `session` is the trainer's,
    `selector` calls the strategy, `journal` keeps state and ledger.
    """

    def __init__(self, journal: Journal) -> None:
        tickets = journal.config.tickets
        supplies = {name: spec.prompts for name, spec in journal.config.adapters.items()}
        self.journal = journal
        self.book = TicketBook(tickets.ttl_s, tickets.max_attempts, tickets.prompts, supplies)
        self.side_state = SideState(journal, self.book)
        self.rates = Rates(journal.clock())
        self.selector = Selector(journal.name, journal.state, self.book, journal.clock, self.rates)
        self.eviction = Eviction(journal, self.selector)
        self.tickets = Tickets(journal, self.side_state, self.selector, self.rates)
        self.arrivals = Arrivals(journal, self.tickets, self.eviction, self.rates)
        self.admission = AdmissionCheck(journal, self.book)
        lock = HistoryLock()
        self.appends = Appends(journal, self.side_state, self.selector, self.admission, self.arrivals, lock)
        self.batches = Batches(journal, self.selector, self.eviction)
        self.session = Session(journal, self.selector, self.eviction, self.batches, self.rates, lock)
        self.trimming = Trimming(journal)
        self.state_cache = StateCache(journal.name, journal.state, self.book, self.selector, journal.clock)
        self.lease = Lease()
        self.durability = "strict"

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.journal.name

    @property
    def state(self) -> RunState:
        """State of the run."""
        return self.journal.state

    @property
    def measured(self) -> MeasuredRates:
        """How fast groups come in and are used, as this server saw it."""
        return self.rates.measure(self.journal.clock())

    # ------------------------------------------------------------------ life

    @classmethod
    async def create(cls, name: str, store: Store, token: str, config: RunConfig, clock: Callable[[], float]) -> Run:
        """Write the first ledger record of a new run, and lead it. Raises `Invalid` where it cannot work."""
        journal = Journal(name, store, clock)
        resolved, bounds = resolve_config(config)
        await store.runs.add(name)
        async with journal.taking_over(token):
            await journal.append(_config_record(resolved, bounds.max_uses, "running", None, clock()))
        return cls(journal)

    @classmethod
    async def load(cls, name: str, store: Store, clock: Callable[[], float]) -> Run | None:
        """Rebuild a run from its streams, to follow it; None where there is no ledger (a creation never finished)."""
        journal = Journal(name, store, clock)
        await journal.load()
        if journal.state.config is None:
            return None
        run = cls(journal)
        await run.side_state.reload()
        return run

    async def lead(self, token: str) -> None:
        """Decide from here on; what the older leader left is taken in first. Raises `DataLost`."""
        await self.journal.check_kept()
        async with self.journal.taking_over(token):
            await self.tickets.reload()
            self.arrivals.find_recent()
            await self.eviction.judge_inherited()
        await self.journal.notify()

    async def close(self) -> None:
        """Wake every waiter; each is answered with what it waits for."""
        await self.journal.close()

    async def ingest(self) -> None:
        """Take in what is new in the streams."""
        await (self.arrivals.pull() if self.journal.leading else self.arrivals.follow())

    def restore_side_state(self, book: RunTickets, term: int) -> None:
        """Take in, as a follower, what the leader keeps beside the streams; `term` was ours when `book` was read."""
        if not self.journal.leading and self.journal.terms == term:  # a leader's book is ahead of what was read before
            self.side_state.restore(book)

    async def tick(self) -> None:
        """Do what time alone brings about: expire tickets, end a used-up run, delete freed payloads, trim."""
        if not self.journal.leading:
            return
        await self.arrivals.settle()
        await self.tickets.expire()
        if all(self.book.used_up(name) for name in self.journal.config.adapter_names):
            await self.batches.end_if_used_up()
        await self.journal.free_payloads()
        await self.arrivals.adopt_recent()
        await self.trimming.tick()

    # ------------------------------------------------------------------ operator

    async def patch(self, patch: ConfigPatch) -> None:
        """Change strategy, filters, limits or state while the run goes on; what changes nothing leaves no record.

        Raises `Conflict`, `Invalid`.
        """
        journal, state = self.journal, self.state
        async with journal.decision():
            config, max_uses = journal.config, state.max_uses
            changed = _changed(config, patch)
            if changed != config or patch.state == "running":  # a run whose plug-in is gone may be paused and finished
                config, bounds = resolve_config(changed)
                max_uses = bounds.max_uses
                if patch.strategy:
                    self._check_standing_batches(bounds)
            wanted = patch.state or state.config_state
            if state.state == "finished" and state.config_state != "finished" and patch.state not in (None, "finished"):
                raise Conflict(
                    f"run {self.name} reached max_steps = {journal.config.max_steps}; it cannot be {wanted}",
                    name="state",
                    value=wanted,
                    bound="finished",
                )
            reason = "operator" if patch.state else state.config_reason
            reason = None if wanted == "running" else reason
            standing = journal.config, state.max_uses, state.config_state, state.config_reason
            if (config, max_uses, wanted, reason) == standing:
                return
            await journal.append(_config_record(config, max_uses, wanted, reason, journal.clock()))
        await self.eviction.judge_all()
        await journal.notify()

    def _check_standing_batches(self, bounds: Bounds) -> None:
        """Refuse bounds that a batch already handed out, and not yet acked, breaks."""
        index = self.state.index
        for step, batch in self.state.batches.items():
            if batch.acked:
                continue
            rows = index.rows_of(batch.numbers)
            ages = self.state.versions_at(step, rows) - index["policy_version"][rows]
            for name, bound, found in (
                ("max_staleness", bounds.max_staleness, int(ages.max())),
                ("max_uses", bounds.max_uses, int(index["times_sampled"][rows].max())),
            ):
                if bound is not None and found > bound:
                    raise Conflict(
                        f"{name} would be {bound}; batch {step}, not yet acked, has {found}",
                        name=name,
                        value=bound,
                        bound=found,
                    )

    async def purge(self) -> int:
        """Let the bytes of dead letters go, but for those in batches that may be asked for again; return how many."""
        async with self.journal.decision():
            numbers = self.state.purgeable()
            if numbers:
                await self.journal.append(PurgeRecord(numbers=numbers, at_s=self.journal.clock()))
        return len(numbers)

    def same_config(self, config: RunConfig) -> list[str]:
        """Name the fields in which `config` differs from the run's, which may be older than some options."""
        standing, wanted = self.journal.config, resolve_config(config)[0]
        return differing_fields(standing, wanted) and differing_fields(resolve_config(standing)[0], wanted)

    # ------------------------------------------------------------------ looking

    def describe(self) -> dict[str, Any]:
        """Render the state of the run."""
        return self.state_cache.state(durability=self.durability, rejected=dict(self.side_state.rejected))


def _changed(config: RunConfig, patch: ConfigPatch) -> RunConfig:
    """Put what a patch names in place of what a run has."""
    fields: dict[str, Any] = {}
    if patch.filters is not None:
        fields["filters"] = patch.filters
    if patch.limits:
        fields["limits"] = patch.limits.of(config.limits)
    if patch.strategy:
        name = patch.strategy.name or config.strategy.name
        fields["strategy"] = StrategySpec(name=name, options=patch.strategy.options)
    return msgspec.structs.replace(config, **fields)


def _config_record(
    config: RunConfig, max_uses: int | None, state: Any, reason: str | None, at_s: float
) -> ConfigRecord:
    return ConfigRecord(config=msgspec.to_builtins(config), max_uses=max_uses, state=state, reason=reason, at_s=at_s)
