"""Several inference engines as one: the least loaded server gets the request, and other servers retry it.

`replaybuf.generator.fleet.member` has the circuit breaker and the version check of one server.
`replaybuf.generator.fleet.publication` says what a publication does to requests in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from replaybuf.errors import EngineAway, EngineFault, EngineUnfit, GroupAborted, counted
from replaybuf.generator.engines import Load, Sample, Sampling, Server
from replaybuf.generator.failures import Losses
from replaybuf.generator.fleet.member import STALE, Member, ServerStatus, Shared, stale_fault
from replaybuf.generator.fleet.publication import (
    SUPERSEDED,
    OnPublish,
    ahead,
    continued,
    finished,
    joined,
    pieces,
    rejection,
    remainder,
    stale,
    too_old,
    unfinished,
)
from replaybuf.wire.group import Int32s
from replaybuf.wire.text.pieces import Piece

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES = 3
"""Tries per request in all; sampling again does no harm."""
RETRY_PAUSE_S = 0.5
"""Pause before a retry on the server that has just failed the request."""
_LOG_EVERY_S = 10.0
_REQUEST_OR_SERVER = ("engine_bad_answer", "engine_refused")
"""Either the request or the server is at fault; another server's answer decides."""


class Fleet:
    """Servers of the same model, used as one engine.

    A request that fails with `EngineAway` goes to another server, except after a timeout: a retry could take as long
    again, and the ticket expires. A refused or badly answered request goes to one other server. If that one answers
    well, the first server has failed; otherwise the request is at fault. With no server up, a request waits up to
    `patience_s` seconds. An `EngineUnfit` server is suspended while others are up.

    `max_staleness`: the run's bound, None = unknown or unbounded; a group that a publication puts beyond it is given
    up. `on_lost`: see `Shared`.
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
        self._shared = Shared()
        self._members = [Member(server, self._shared) for server in servers]
        self._patience_s = patience_s
        self._on_publish = on_publish
        self._log_at_s = 0.0

    @property
    def up(self) -> bool:
        """Whether at least one server takes requests."""
        return any(member.fault is None for member in self._members)

    @property
    def waiting(self) -> str | None:
        """Why no server takes requests; None while one does."""
        reasons = {None if member.fault is None else member.fault.reason for member in self._members}
        if None in reasons:
            return None
        return STALE if reasons == {STALE} else "engine_away"

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus completion that every server takes, in tokens; None where no server reports it."""
        return min((m.server.max_model_len for m in self._members if m.server.max_model_len is not None), default=None)

    @property
    def newest_version(self) -> int:
        """Newest version that any server has reported."""
        return max(member.newest for member in self._members)

    def status(self) -> tuple[ServerStatus, ...]:
        """Return the status of every server."""
        return tuple(member.status() for member in self._members)

    def call_on_lost(self, on_lost: Callable[[int], None]) -> None:
        """Set the function to call when a server lost an unpublished version; see `Shared`."""
        self._shared.on_lost = on_lost

    async def read_loads(self) -> list[Load | None]:
        """Read the gauges of the servers that are up; None for a server without gauges, nothing for a failed call."""
        members = [member for member in self._members if member.fault is None]
        answered = await asyncio.gather(*(member.read_load() for member in members))
        return [member.load for member, usable in zip(members, answered, strict=True) if usable]

    async def check_idle(self, within_s: float) -> None:
        """Check all servers without requests at the same time, each for at most `within_s` seconds."""
        await asyncio.gather(*(member.check_idle(within_s) for member in self._members))

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, losses: Losses | None = None) -> Sample:
        """Sample whole completions on the least loaded server; see `Engine.generate`.

        Completions that were aborted and cannot be continued are missing, as far as `losses` allows it. Raises
        `EngineFault` (`superseded`) where they are too old for every batch to come.
        """
        sample, member = await self._sample(prompt_ids, sampling)
        if sample.aborted:
            sample = await self._resume_all(prompt_ids, sampling, sample, member, losses or Losses())
        self.check_use(sample.policy_version)
        return sample

    async def ask(self, tokens: int, call: Callable[[Server], Awaitable[T]]) -> T:
        """Make another call than `generate` on the least loaded server, with the same retries and errors.

        `tokens`: the weight of the call beside other requests.
        """
        result, _ = await self._try(tokens, lambda member: call(member.server))
        return result

    def learn_published(self, version: int) -> None:
        """Record the published version, and check which servers it did not reach.

        A lower version than before means a rewind, which took back the loaded weights: no server is used until it has
        other weights.
        """
        before, self._shared.published = self._shared.published, version
        for member in self._members:
            if before is not None and version < before:
                member.learn_rewind(version)
            elif version != before:
                member.learn_published()

    async def find_lost_versions(self) -> None:
        """Read the versions of the servers that are up, so that `on_lost` is called; ignore failed calls."""
        reads = (member.read_version() for member in self._members if member.fault is None)
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineFault):
                raise outcome

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as a server is up. Raises `EngineAway` after `timeout_s` seconds."""
        await self._wait(lambda: self.up, timeout_s)

    async def prepare(self, timeout_s: float) -> None:
        """Wait for every server and read what it serves.

        Raises `EngineAway` where one is not up in time, `EngineUnfit` where they serve different models.
        """
        for member in self._members:
            member.start()
        await self._wait(self._all_up, timeout_s)
        served = {member.server.url: member.server.model for member in self._members}
        if len(set(served.values())) > 1:
            raise EngineUnfit("engine_unfit", f"engines serve different models: {served}", name="engine", value=served)

    async def aclose(self) -> None:
        """Stop probing and close all connections."""
        for member in self._members:
            await member.aclose()

    def check_use(self, oldest: int) -> None:
        """Raise `EngineFault` (`superseded`) where a token of version `oldest` is too old for every batch to come."""
        self._check_age(oldest, EngineFault)

    def check_rest(self, oldest: int) -> None:
        """Do the same before more tokens are sampled; the fault is `GroupAborted`."""
        self._check_age(oldest, GroupAborted)

    def _check_age(self, oldest: int, fault: type[EngineFault]) -> None:
        published = self._shared.published
        if too_old(oldest, published, self.max_staleness):
            raise fault(
                SUPERSEDED,
                f"tokens of version {oldest} are too old: published is {published}, max_staleness of the run is "
                f"{self.max_staleness}",
                name="policy_version",
                value=oldest,
                bound=self.max_staleness,
            )

    # ------------------------------------------------------------------ requests

    async def _sample(
        self, prompt_ids: Int32s, sampling: Sampling, avoid: Member | None = None
    ) -> tuple[Sample, Member]:
        """Return a sample that `on_publish` accepts, and the server that made it."""
        tokens = len(prompt_ids) + sampling.n * sampling.max_tokens
        return await self._try(tokens, lambda member: self._sample_on(member, prompt_ids, sampling), avoid)

    async def _try(
        self, tokens: int, call: Callable[[Member], Awaitable[T]], avoid: Member | None = None
    ) -> tuple[T, Member]:
        failed: list[Member] = []
        doubt: tuple[Member, EngineFault] | None = None  # the server's failure, if another server answers well
        while True:
            member = await self._choose(failed, avoid)
            try:
                with member.carrying(tokens):
                    result = await call(member)
            except EngineAway as error:
                member.record_failure(error)
                failed.append(member)
                if len(failed) >= TRIES or error.reason == "engine_timeout":
                    raise _last_fault(error) from error
            except EngineUnfit as error:
                if not self._usable([member]):
                    raise
                member.suspend(error)
            except EngineFault as error:
                unclear = error.reason in _REQUEST_OR_SERVER
                member.refusals += unclear
                failed.append(member)
                if not unclear or doubt is not None or not self._usable(failed):
                    raise
                doubt = member, error
            else:
                member.record_answer()
                if doubt is not None:
                    doubt[0].record_failure(doubt[1])
                return result, member

    async def _sample_on(self, member: Member, prompt_ids: Int32s, sampling: Sampling) -> Sample:
        published, url = self._shared.published, member.server.url
        sample = await member.server.generate(prompt_ids, sampling)
        if len(sample.version_spans):
            newest = int(sample.version_spans[:, 1].max())
            if stale(sample.policy_version, published):
                raise stale_fault(url, f"version {sample.policy_version}", published)
            if ahead(newest, self._shared.published):
                raise stale_fault(url, f"version {newest}", self._shared.published)
            member.newest = max(member.newest, newest)
        rejected = rejection(self._on_publish, sample)
        if rejected is not None:
            raise EngineAway(rejected[0], f"engine {url} {rejected[1]}", name="engine", value=url)
        return sample

    async def _resume_all(
        self, prompt_ids: Int32s, sampling: Sampling, sample: Sample, member: Member, losses: Losses
    ) -> Sample:
        """Continue the aborted rollouts of a sample side by side, each from its own tokens."""
        works = [
            functools.partial(self._resume, prompt_ids, sampling, rollout, piece, member)
            for rollout, piece in enumerate(pieces(sample))
        ]
        resumed = await losses.gather_rest(works, [1] * len(works))
        requests = sum(count for _, count in resumed)
        return joined([piece for piece, _ in resumed], sample.metadata | {"resumed_requests": requests})

    async def _resume(
        self, prompt_ids: Int32s, sampling: Sampling, rollout: int, piece: Piece, member: Member
    ) -> tuple[Piece, int]:
        """Sample the rest of a rollout; return the whole rollout and the number of requests.

        It prefers another server than `member`, which is about to load weights. Raises `EngineAway` (`engine_aborted`)
        after `TRIES` requests in a row without a token.
        """
        requests = empty = 0
        while unfinished(piece, sampling):
            if empty >= TRIES:
                detail = (
                    f"engine {member.server.url} aborted a rollout {counted(empty, 'time')} without a token between"
                )
                raise EngineAway("engine_aborted", detail, name="engine", value=member.server.url, bound=TRIES)
            if len(piece):
                self.check_rest(int(piece.spans[0, 0]))
            so_far = np.concatenate([prompt_ids, piece.token_ids])
            sample, member = await self._sample(so_far, remainder(sampling, rollout, piece), avoid=member)
            (later,) = pieces(sample)
            piece = continued(piece, later)
            requests, empty = requests + 1, 0 if len(later) else empty + 1
        return finished(piece), requests

    # ------------------------------------------------------------------ choosing and waiting

    async def _choose(self, failed: Sequence[Member], avoid: Member | None) -> Member:
        """Return the least loaded server; where possible, one that has not failed this request and is not `avoid`."""
        await self.wait_ready(self._patience_s)
        if failed and not self._usable(failed) and failed[-1].fault is None:
            await asyncio.sleep(RETRY_PAUSE_S)
            await self.wait_ready(self._patience_s)
        others = self._usable([*failed, avoid]) if avoid is not None else ()
        usable = others or self._usable(failed) or self._usable(())
        ready = [member for member in usable if member.state == "up" or not member.requests]
        return min(
            ready or usable, key=lambda member: (member.refusals if failed else 0, member.tokens, member.requests)
        )

    def _usable(self, excluded: Sequence[Member]) -> list[Member]:
        return [member for member in self._members if member.fault is None and member not in excluded]

    def _all_up(self) -> bool:
        unfit = next((m.fault for m in self._members if isinstance(m.fault, EngineUnfit)), None)
        if unfit is not None:
            raise unfit
        return all(member.fault is None for member in self._members)

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the condition holds, and log now and then which engines are missing."""
        clock, changed = asyncio.get_running_loop().time, self._shared.changed
        ends_s = clock() + timeout_s
        while not condition():
            for member in self._members:
                if member.watch is not None and member.watch.done():
                    member.watch.result()  # raises the error of a probe that broke
            faults = "; ".join(str(member.fault) for member in self._members if member.fault is not None)
            if clock() >= ends_s:
                raise EngineAway("engine_away", f"no engine came up within {timeout_s:g} s: {faults}")
            if clock() >= self._log_at_s:
                logger.warning("waiting for an engine: %s", faults)
                self._log_at_s = clock() + _LOG_EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(ends_s - clock(), _LOG_EVERY_S)), changed:
                    await changed.wait()


def _last_fault(error: EngineAway) -> EngineAway:
    """Return the fault of the last try; `engine_lost` instead of `engine_away`, as the request may be the cause."""
    if error.reason != "engine_away":
        return error
    detail = f"the connection to the engine failed in {TRIES} tries in a row; the last: {error.detail}"
    return EngineAway("engine_lost", detail, name="engine", value=error.value, bound=TRIES)
