"""Several inference engines as one: of those that are up, the one with the fewest tokens outstanding gets the request.

Life of a server, as its circuit breaker sees it::

    starting ──► up ──► aside ──► trial ──► up
                          ▲         │
                          └─────────┘

Up or in trial, it is put aside by `FAILURES_IN_A_ROW` failures without an answer between them (so in trial mostly by
the first), or by a connection that fails; in trial, one answer makes it up. Aside, it gets no request and is probed
(`healthy`, then `prepare`: it may have been started anew) after pauses that double. In trial it gets one request at a
time while others are up.

An engine that missed a publication is stale: it was started anew, or its weights did not come. So is one more than one
version ahead: it has weights of another run. It is found out by its version: whenever one is published, before it comes
back from aside, and by what it samples. It is put aside until its version is right. What a publication does to the
requests in flight: `replaybuf.generator.fleet.publication`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit
from replaybuf.generator.engines import Load, Sample, Sampling, Server
from replaybuf.generator.fleet.member import Member, ServerStatus
from replaybuf.generator.fleet.publication import (
    SUPERSEDED,
    OnPublish,
    Piece,
    ahead,
    doomed,
    finished,
    joined,
    pieces,
    refusal,
    remainder,
    stale,
    unfinished,
)
from replaybuf.wire.group import Int32s

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES = 3
"""A request that one engine failed is tried this often in all; sampling again does no harm."""
FAILURES_IN_A_ROW = 3
"""So many put a server aside; one that cannot be connected to is put aside at once."""
RETRY_PAUSE_S = 0.5
"""Before the next try on a server that has just failed the same request."""
_LOG_EVERY_S = 10.0
BEHIND = "engine_behind"
"""It has what is published, but not yet what already sampled elsewhere: a publication goes on."""
_NO_FAILURE = ("engine_aborted", "engine_restarted", "engine_version_changed", BEHIND)
"""Reasons for another try that say nothing against the server."""
STALE = "engine_stale"
_AT_ONCE = ("engine_away", STALE)
"""Reasons that put a server aside without a second failure."""


_DOUBTFUL = ("engine_bad_answer", "engine_refused")
"""The request's fault, or the server's: another server knows."""


class _Doubt(NamedTuple):
    """A server, and an answer of it that would be its failure if another one answers well."""

    member: Member
    fault: EngineFault


class Fleet:
    """Engines side by side, serving the same model.

    A request that fails with `EngineAway` goes to another server; only a timeout is told at once, since the next try
    may take as long again and the ticket does not wait. One that is refused, or answered in a way that cannot be used,
    goes to one other server: if that answers well, the first one has failed; if not, the request is at fault. With no
    server up it waits up to `patience_s` seconds for any to come back. An `EngineUnfit` server is put aside too while
    others are up.

    `max_staleness`: the run's, None = not known or unbounded. A group that a publication puts beyond it is given up.
    `on_lost` is told the published version when a server has lost a later one, which will never be published as it was.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        patience_s: float = 30.0,
        on_publish: OnPublish = "in-flight",
        max_staleness: int | None = None,
    ) -> None:
        self.max_staleness = max_staleness
        self.on_lost: Callable[[int], None] = lambda published: None
        self._members = [Member(server) for server in servers]
        self._patience_s = patience_s
        self._on_publish = on_publish
        self._published: int | None = None
        self._changed = asyncio.Condition()
        self._log_at_s = 0.0

    @property
    def up(self) -> bool:
        """Whether at least one server takes requests, as far as is known."""
        return any(member.fault is None for member in self._members)

    @property
    def waiting(self) -> str | None:
        """Say why no server takes requests; None where one does."""
        if self.up:
            return None
        reasons = {member.fault.reason for member in self._members if member.fault is not None}
        return STALE if reasons == {STALE} else "engine_away"

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and completion together that every server takes, in tokens; None where none tells."""
        return min((m.server.max_model_len for m in self._members if m.server.max_model_len is not None), default=None)

    def status(self) -> tuple[ServerStatus, ...]:
        """Return how every server is doing."""
        return tuple(member.status() for member in self._members)

    async def look(self) -> list[Load | None]:
        """Read the gauges of the servers that are up; the loads of those that answered, None for one without gauges."""
        members = [member for member in self._members if member.fault is None]
        told = await asyncio.gather(*(_load(member) for member in members))
        return [member.load for member, answered in zip(members, told, strict=True) if answered]

    async def generate(self, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        """Sample completions on the least loaded server, whole ones; see `Engine.generate`.

        Raises `EngineFault` (`superseded`) where no batch can use them any more.
        """
        sample, member = await self._asked(prompt_ids, sampling)
        if sample.aborted:
            sample = await self._resumed(prompt_ids, sampling, sample, member)
        self.check_use(sample.policy_version)
        return sample

    async def ask(self, tokens: int, call: Callable[[Server], Awaitable[T]]) -> T:
        """Have a server answer something else than a sample: the least loaded one, others where it fails.

        `tokens`: what the request weighs beside others. Raises what `call` raises, as `generate` does.
        """
        result, _ = await self._tried(tokens, lambda member: call(member.server))
        return result

    def learn_published(self, version: int) -> None:
        """Take in the version published now.

        Where it rose, find out which servers it did not reach. Where it fell, a rewind took back the weights that the
        servers have: none is used until it has others.
        """
        before, self._published = self._published, version
        for member in self._members:
            if before is not None and version < before:
                member.rewound, member.newest = True, min(member.newest, version)
                self._put_aside(
                    member, stale_fault(member.server.url, f"weights from before a rewind to {version}", version)
                )
            elif version != before:
                self._look_again(member)

    async def look_for_lost(self) -> None:
        """Ask the servers that are up for their versions, for `on_lost`; one that does not answer is left alone."""
        asked = (self._loaded(member) for member in self._members if member.fault is None)
        for told in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(told, BaseException) and not isinstance(told, EngineFault):
                raise told

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as a server is up. Raises `EngineAway` after `timeout_s` seconds."""
        await self._wait(lambda: self.up, timeout_s)

    async def prepare(self, timeout_s: float) -> None:
        """Wait for every server and learn what it serves.

        Raises `EngineAway` where one is not up in time, `EngineUnfit` where they serve different models.
        """
        for member in self._members:
            member.fault = EngineAway("engine_away", f"engine {member.server.url} is not up yet")
            member.watch = asyncio.create_task(self._watch(member, first_pause_s=0.0))
        await self._wait(self._all_up, timeout_s)
        served = {member.server.url: member.server.model for member in self._members}
        if len(set(served.values())) > 1:
            raise EngineUnfit("engine_unfit", f"engines serve different models: {served}", name="engine", value=served)

    async def aclose(self) -> None:
        """Stop probing and close all connections."""
        tasks = [task for member in self._members for task in (member.watch, member.check) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self._members:
            await member.server.aclose()

    # ------------------------------------------------------------------ requests

    async def _asked(
        self, prompt_ids: Int32s, sampling: Sampling, avoid: Member | None = None
    ) -> tuple[Sample, Member]:
        """Ask a server, or several one after another, for a sample that the policy lets be used."""
        tokens = len(prompt_ids) + sampling.n * sampling.max_tokens
        return await self._tried(tokens, lambda member: self._sampled(member, prompt_ids, sampling), avoid)

    async def _tried(
        self, tokens: int, call: Callable[[Member], Awaitable[T]], avoid: Member | None = None
    ) -> tuple[T, Member]:
        failed: list[Member] = []
        doubt: _Doubt | None = None
        while True:
            member = await self._choose(failed, avoid)
            try:
                with member.carrying(tokens):
                    result = await call(member)
            except EngineAway as error:
                self._count(member, error)
                failed.append(member)
                if len(failed) >= TRIES:
                    raise _after_tries(error) from error
                if error.reason == "engine_timeout":
                    raise
            except EngineUnfit as error:
                if not any(other.fault is None for other in self._members if other is not member):
                    raise
                self._put_aside(member, error)
            except EngineFault as error:
                member.doubts += error.reason in _DOUBTFUL
                if error.reason not in _DOUBTFUL or doubt is not None or not self._usable([*failed, member]):
                    raise
                doubt = _Doubt(member, error)
                failed.append(member)
            else:
                member.failures = member.setbacks = member.doubts = 0
                if doubt is not None:
                    self._count(doubt.member, doubt.fault)
                return result, member

    async def _sampled(self, member: Member, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        published, url = self._published, member.server.url
        sample = await member.server.generate(prompt_ids, sampling)
        if len(sample.version_spans):
            newest = int(sample.version_spans[:, 1].max())
            if stale(sample.policy_version, published):
                raise stale_fault(url, f"version {sample.policy_version}", published)
            if ahead(newest, self._published):
                raise stale_fault(url, f"version {newest}", self._published)
            member.newest = max(member.newest, newest)
        refused = refusal(self._on_publish, sample)
        if refused is not None:
            raise EngineAway(refused[0], f"engine {url} {refused[1]}", name="engine", value=url)
        return sample

    async def _resumed(self, prompt_ids: Int32s, sampling: Sampling, sample: Sample, member: Member) -> Sample:
        """Continue the aborted rollouts of a sample, each from its own tokens, side by side."""
        begun = pieces(sample)
        work = [self._rest(prompt_ids, sampling, index, piece, member) for index, piece in enumerate(begun)]
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            ended = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        requests = sum(count for _, count in ended)
        return joined([piece for piece, _ in ended], sample.metadata | {"resumed_requests": requests})

    async def _rest(
        self, prompt_ids: Int32s, sampling: Sampling, rollout: int, piece: Piece, member: Member
    ) -> tuple[Piece, int]:
        """Sample what a rollout lacks; return it whole, with the number of requests that took.

        Another server goes first: the one that aborted it is about to load weights. Raises `EngineAway`
        (`engine_aborted`) where `TRIES` requests one after another come back without a token.
        """
        requests = in_vain = 0
        while unfinished(piece, sampling):
            if in_vain >= TRIES:
                detail = f"engine {member.server.url} aborted a rollout {in_vain} times without a token between"
                raise EngineAway("engine_aborted", detail, name="engine", value=member.server.url, bound=TRIES)
            if len(piece):
                self.check_use(int(piece.spans[0, 0]))
            so_far = np.concatenate([prompt_ids, piece.token_ids])
            sample, member = await self._asked(so_far, remainder(sampling, rollout, piece), avoid=member)
            (later,) = pieces(sample)
            piece = piece.followed_by(later)
            requests, in_vain = requests + 1, 0 if len(later) else in_vain + 1
        return finished(piece), requests

    def check_use(self, oldest: int) -> None:
        """Raise `EngineFault` (`superseded`) where no batch can use a token of version `oldest` any more."""
        if doomed(oldest, self._published, self.max_staleness):
            raise EngineFault(
                SUPERSEDED,
                f"tokens of version {oldest} are too old: published is {self._published}, max_staleness of the run is "
                f"{self.max_staleness}",
                name="policy_version",
                value=oldest,
                bound=self.max_staleness,
            )

    # ------------------------------------------------------------------ choosing

    async def _choose(self, failed: Sequence[Member], avoid: Member | None) -> Member:
        """Return the least loaded server; where there is one, not one that has failed this request, and not `avoid`."""
        await self.wait_ready(self._patience_s)
        if failed and not self._usable(failed) and failed[-1].fault is None:
            await asyncio.sleep(RETRY_PAUSE_S)
            await self.wait_ready(self._patience_s)
        others = self._usable([*failed, avoid]) if avoid is not None else ()
        usable = others or self._usable(failed) or self._usable(())
        calm = [member for member in usable if member.state == "up" or not member.requests]
        return min(calm or usable, key=lambda member: (member.doubts if failed else 0, member.tokens, member.requests))

    def _usable(self, failed: Sequence[Member]) -> list[Member]:
        return [member for member in self._members if member.fault is None and member not in failed]

    def _all_up(self) -> bool:
        unfit = next((m.fault for m in self._members if isinstance(m.fault, EngineUnfit)), None)
        if unfit is not None:
            raise unfit
        return all(member.fault is None for member in self._members)

    # ------------------------------------------------------------------ the circuit breaker

    def _count(self, member: Member, error: EngineFault) -> None:
        if error.reason in _NO_FAILURE:
            return
        member.failures += 1
        if error.reason in _AT_ONCE or member.failures >= FAILURES_IN_A_ROW:
            self._put_aside(member, error)

    def _put_aside(self, member: Member, error: EngineFault) -> None:
        if member.fault is not None:  # by another of the requests that were in flight there
            return
        member.fault, member.known = error, True
        member.setbacks += 1
        logger.warning(
            "engine %s is put aside after %d failures in a row, probed in %g s: %s",
            member.server.url,
            member.failures,
            member.pause_s,
            error,
        )
        member.watch = asyncio.create_task(self._watch(member, first_pause_s=member.pause_s))

    async def _watch(self, member: Member, *, first_pause_s: float) -> None:
        """Probe a server that is aside until it is back."""
        pause_s, back = first_pause_s, False
        while not back:
            await asyncio.sleep(pause_s)
            back, pause_s = await self._back(member), member.pause_s
        logger.info("engine %s is up", member.server.url)
        member.fault, member.known = None, True
        async with self._changed:
            self._changed.notify_all()

    async def _back(self, member: Member) -> bool:
        try:
            if await member.server.healthy():
                await member.server.prepare()
                await self._check_weights(member)
                return True
        except EngineFault as fault:
            member.fault = fault
            if member.known:
                logger.warning("engine %s stays aside: %s", member.server.url, fault)
            async with self._changed:  # `prepare` gives up on a server that does not fit
                self._changed.notify_all()
        member.setbacks += member.known
        return False

    # ------------------------------------------------------------------ versions

    def _look_again(self, member: Member) -> None:
        """Look at a server's version now that another is published; one that is stale may have got it."""
        if member.fault is None and (member.check is None or member.check.done()):
            member.check = asyncio.create_task(self._check_version(member))
        elif member.fault is not None and member.fault.reason == STALE and member.watch is not None:
            member.watch.cancel()
            member.watch = asyncio.create_task(self._watch(member, first_pause_s=0.0))

    async def _check_version(self, member: Member) -> None:
        """Put a server aside that a publication did not reach; again where another comes meanwhile."""
        checked: int | None = None
        while member.fault is None and checked != self._published:
            checked = self._published
            try:
                await self._check_weights(member)
            except EngineAway as error:
                self._count(member, error)
            except EngineFault as error:  # what the next request will meet, too, and judge
                logger.warning("engine %s tells no version: %s", member.server.url, error)

    async def _check_weights(self, member: Member) -> None:
        """Raise `EngineAway` (`engine_stale`) where a server has weights that are not, nor about to be, published."""
        published = self._published  # now: a version published while the server is asked may be newer than the answer
        version = await self._loaded(member)
        wrong = stale(version, published) or ahead(version, self._published)
        if wrong or (member.rewound and stale(published, version)):
            raise stale_fault(member.server.url, f"version {version}", published)
        member.rewound = False

    async def _loaded(self, member: Member) -> int | None:
        """Ask a server for its version. Where it fell from one that was not published, that one is lost."""
        before = member.newest  # what comes while the server is asked may be newer than its answer
        version = await member.server.loaded_version()
        if version is None or version >= before:
            member.newest = max(member.newest, version or 0)
            return version
        member.newest = version
        if self._published is not None and before > self._published:
            told = "engine %s has lost version %d before it was published: it has %d"
            logger.warning(told, member.server.url, before, version)
            self.on_lost(self._published)
        return version

    # ------------------------------------------------------------------ waiting

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the condition holds; now and then say for what."""
        clock = asyncio.get_running_loop().time
        ends_s = clock() + timeout_s
        while not condition():
            self._check_watches()
            faults = "; ".join(str(member.fault) for member in self._members if member.fault is not None)
            if clock() >= ends_s:
                raise EngineAway("engine_away", f"waited {timeout_s:g} s for an engine in vain: {faults}")
            if clock() >= self._log_at_s:
                logger.warning("waiting for an engine: %s", faults)
                self._log_at_s = clock() + _LOG_EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(ends_s - clock(), _LOG_EVERY_S)), self._changed:
                    await self._changed.wait()

    def _check_watches(self) -> None:
        """Raise what ended a probe that nothing should have ended."""
        for member in self._members:
            if member.watch is not None and member.watch.done():
                member.watch.result()


def _after_tries(error: EngineAway) -> EngineAway:
    """Return what to tell of a request whose last try failed; servers may be lost because of it: not `away`."""
    if error.reason != "engine_away":
        return error
    detail = f"the engine was lost in {TRIES} tries one after another; the last: {error.detail}"
    return EngineAway("engine_lost", detail, name="engine", value=error.value, bound=TRIES)


def stale_fault(url: str, what: str, published: int | None) -> EngineAway:
    """Return the fault of a server that lacks what is published; it puts the server aside at once."""
    return EngineAway(STALE, f"engine {url} has {what}; published is {published}", name="engine", value=url)


async def _load(member: Member) -> bool:
    """Learn a server's load; False where it gave no usable answer, which is no failure of what it is there for."""
    try:
        member.load = await member.server.load()
    except EngineFault as fault:
        member.load = None
        logger.debug("no gauges: %s", fault)
        return False
    return True
