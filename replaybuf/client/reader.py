"""Batch readers: one rank's part of each step in order, the next batch prefetched while this one trains.

    attached = client.attach(dp_world_size=1)
    with BatchReader(client, attached.epoch, attached.step) as reader:
        for batch in reader:
            ...                       # train on batch.micro_batches
            reader.ack()              # by one rank; then write, load and publish the weights

One thread fetches. It holds at most one batch, the one after the batch in training. If the strategy does not allow that
step yet, the thread asks again every `poll_s`, after each ack of this reader, and when the consumer wants the batch.

Life cycle: made -> `start` (by entering, or by the first batch) -> batches -> `stop` (from any thread or signal
handler; wakes every waiter) -> `close` (stops, and waits for the thread). The iteration ends with the run and with
`stop`. Every other error of `Client.fetch_batch` is raised by the iteration when the consumer wants that batch.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from replaybuf.client.http_client import HttpClient
from replaybuf.client.retries import Patience
from replaybuf.errors import BatchOverdue, Conflict, Invalid, MissingExtra, RunFinished, ServiceUnavailable
from replaybuf.wire.batch import Batch, BatchMeta, read_batch
from replaybuf.wire.contract import WaitingAnswer

if TYPE_CHECKING:
    from replaybuf.client.direct import DirectBodies
    from replaybuf.wire.plan import Body

logger = logging.getLogger(__name__)

WARN_AFTER_S = 10.0
"""A reader that has waited this long for a batch logs a warning; then again after 20 s more, 40 s more, ..."""
MAX_WARNING_GAP_S = 300.0


class HasMeta(Protocol):
    """A batch in any form that a reader returns."""

    @property
    def meta(self) -> BatchMeta:
        """The metadata of the body."""


B = TypeVar("B", bound=HasMeta)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """Options of a reader. Raises `Invalid` for a number outside its bound.

    - `dp_rank`: the rank whose part is read, below `dp_world_size`, the number of ranks that read. A batch packed for
      another number raises `Conflict`: with fewer readers than ranks, a part of it would not be trained
    - `poll_s`: seconds between two requests for a batch; `wait_ms`: how long the service may hold each (0 = poll, else
      long-poll), which `close` may have to wait for
    - `prefetch`: fetch the next batch while this one trains
    - `service_timeout_s`: how long the service may be unavailable while the consumer waits for a batch
    - `deadline_s`: how long the consumer waits for one batch before `BatchOverdue` is raised (None = without end)
    - `close_timeout_s`: how long `close` waits for the thread
    - `on_waiting`: called in the thread with every answer that there is no batch, while the consumer waits for one
    - `direct_redis_url`: fetch frames from this Redis (see `replaybuf.client.direct`)
    """

    dp_rank: int = 0
    dp_world_size: int = 1
    poll_s: float = 0.5
    wait_ms: int = 0
    prefetch: bool = True
    service_timeout_s: float = 60.0
    deadline_s: float | None = None
    close_timeout_s: float = 10.0
    on_waiting: Callable[[WaitingAnswer], None] | None = None
    direct_redis_url: str | None = dataclasses.field(default=None, repr=False)  # may hold a password

    def __post_init__(self) -> None:
        minima = {"dp_rank": 0, "dp_world_size": 1, "wait_ms": 0, "service_timeout_s": 0, "close_timeout_s": 0}
        for name, minimum in minima.items():
            value = getattr(self, name)
            if not value >= minimum:
                raise Invalid(f"{name} is {value}; the minimum is {minimum}", name=name, value=value, bound=minimum)
        if self.dp_rank >= self.dp_world_size:
            raise Invalid(
                f"dp_rank is {self.dp_rank}; it must be below dp_world_size = {self.dp_world_size}",
                name="dp_rank",
                value=self.dp_rank,
                bound=self.dp_world_size,
            )
        for name in ("poll_s", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise Invalid(f"{name} is {value}; it must be above 0", name=name, value=value, bound=0)


DEFAULTS = ReaderOptions()


class WaitingLog:
    """Log of one wait for a batch: INFO for each new reason, WARNING after 10 s and then with growing gaps."""

    def __init__(self) -> None:
        self._reason = ""
        self._warn_at_s, self._gap_s = WARN_AFTER_S, 2 * WARN_AFTER_S

    def report(self, step: int, waiting: WaitingAnswer, waited_s: float) -> None:
        """Log an answer after `waited_s` seconds of waiting, if it is time to."""
        level = logging.NOTSET
        if waiting.reason != self._reason:
            level, self._reason = logging.INFO, waiting.reason
        if waited_s >= self._warn_at_s:
            level, self._warn_at_s = logging.WARNING, waited_s + self._gap_s
            self._gap_s = min(2 * self._gap_s, MAX_WARNING_GAP_S)
        if level:
            logger.log(
                level,
                "waiting step=%d reason=%s blocked_on=%s have=%s need=%s waited_s=%.0f%s",
                step,
                waiting.reason,
                waiting.blocked_on,
                waiting.have,
                waiting.need,
                waited_s,
                f" detail={waiting.detail}" if waiting.detail else "",
            )


class StepReader(Generic[B]):
    """Iterator over the batches of one epoch from `step` on; a subclass defines how to `read` a body.

    - `step`: the next one to return; `waiting`: why it is not there yet, None if unknown
    - `waited_s`: seconds that the consumer waited for batches, by reason
    - `finished`: the run has ended
    """

    def __init__(
        self,
        client: HttpClient,
        epoch: int,
        step: int,
        options: ReaderOptions = DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = epoch
        self.step = self._first = step
        self.options = options
        self.waiting: WaitingAnswer | None = None
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.finished = False
        self._client = client
        self._clock = clock
        self._direct = _open_direct(client, options.direct_redis_url)
        self._changed = threading.Condition()
        self._wanted_since_s: float | None = None
        self._nudged = False
        self._parked = False
        self._stopped = False
        self._held: B | None = None
        self._failure: Exception | None = None
        self._patience: Patience | None = None
        self._log = WaitingLog()
        self._thread = threading.Thread(target=self._work, name=f"batches of rank {options.dp_rank}", daemon=True)

    @abstractmethod
    def read(self, body: Body) -> B:
        """Decode a body to a batch; called in the thread."""

    # ------------------------------------------------------------------ the consumer

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        """Wait for the batch of the next step and return it. Raises `BatchOverdue`; call again to wait again."""
        self.start()
        with self._changed:
            if self.finished:
                raise StopIteration
            self._wanted_since_s, self._parked, self._patience = self._clock(), False, None
            self._log = WaitingLog()
            self._nudge()
            in_time = self._changed.wait_for(
                lambda: self._held is not None or self._failure is not None or self._stopped, self.options.deadline_s
            )
            waits, self._wanted_since_s, self.waiting = self.waiting, None, None
            if not in_time:
                raise _overdue(self.step, self.options.deadline_s, waits)
            failure, self._failure = self._failure, None
            batch, self._held = self._held, None
            self.finished = isinstance(failure, RunFinished)
            if failure is not None and not self.finished:
                raise failure
            if batch is None or self._stopped:
                raise StopIteration
            self.step += 1
            self._changed.notify_all()
            return batch

    def ack(self, feedback: dict[str, Any] | None = None, metrics: Mapping[str, float | None] | None = None) -> None:
        """Report that the newest batch is trained, and ask at once for a batch that waits for this ack.

        A repetition does no harm. `Client.ack` works too. Raises `Fenced`, `WrongStep`, `ServiceUnavailable`, and
        `Invalid` before the first batch.
        """
        if self.step == self._first:
            raise Invalid(f"ack before the batch of step {self._first}; get that batch first", name="step", value=None)
        self._client.ack(self.step - 1, self.epoch, feedback, metrics)
        with self._changed:
            self._nudge()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        with self._changed:
            if self._thread.ident is None and not self._stopped:
                self._thread.start()

    def stop(self) -> None:
        """End the iteration without waiting."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop and wait for the thread, at most `close_timeout_s`; then it ends with its request."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(self.options.close_timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "the reader's thread still waits for the service after %.1f s; it ends with its request",
                self.options.close_timeout_s,
            )
        elif self._direct:
            self._direct.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while (step := self._next_task()) is not None:
            began_s = self._clock()
            try:
                body = self._fetch(step)
                if isinstance(body, WaitingAnswer):
                    self._wait(body, began_s)
                else:
                    self._hold(self._checked(self.read(body)))
            except Exception as error:  # noqa: BLE001  # the consumer gets it
                self._fail(error)

    def _next_task(self) -> int | None:
        """Wait until there is something to fetch; return its step, or None once the reader is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._may_fetch())
            self._nudged = False
            return None if self._stopped else self.step

    def _may_fetch(self) -> bool:
        if self._held is not None or self._failure or self._parked:
            return False
        return self.options.prefetch or self._wanted_since_s is not None

    def _fetch(self, step: int) -> Body | WaitingAnswer:
        source = self._direct.fetch if self._direct else self._client.fetch_batch
        return source(step, self.epoch, dp_rank=self.options.dp_rank, wait_ms=self.options.wait_ms)

    def _checked(self, batch: B) -> B:
        packed, reading = batch.meta.dp_world_size, self.options.dp_world_size
        if reading != packed:
            raise Conflict(
                f"dp_world_size of the reader is {reading}; batch {batch.meta.step} is packed for {packed}. Attach "
                f"with {reading}, or give ReaderOptions(dp_rank=, dp_world_size={packed}) to a reader for each rank",
                name="dp_world_size",
                value=reading,
                bound=packed,
            )
        return batch

    def _hold(self, batch: B) -> None:
        with self._changed:
            self._held = batch
            self._changed.notify_all()

    def _wait(self, waiting: WaitingAnswer, began_s: float) -> None:
        """Pause until the next request; time during which the service held the last one counts."""
        with self._changed:
            self.waiting, self._patience = waiting, None
            wanted_since_s = self._wanted_since_s
        if wanted_since_s is not None:
            self._log.report(self.step, waiting, self._clock() - wanted_since_s)
            if self.options.on_waiting:
                self.options.on_waiting(waiting)
        with self._changed:
            self._pause(self.options.poll_s - (self._clock() - began_s if self.options.wait_ms else 0.0))
            if self._wanted_since_s is not None:
                self.waited_s[waiting.reason] += self._clock() - max(began_s, self._wanted_since_s)

    def _fail(self, error: Exception) -> None:
        """Give an error to a waiting consumer, unless the service may come back in time.

        An error of a prefetch is dropped: the batch is requested again when the consumer wants it.
        """
        with self._changed:
            if self._wanted_since_s is None:
                self._parked = True
                return
            pause_s = self._pause_after(error)
            if pause_s is None:
                self._failure = error
                self._changed.notify_all()
            else:
                logger.warning("waiting %.1f s for the service: %s", pause_s, error)
                self._pause(pause_s)

    def _pause_after(self, error: Exception) -> float | None:
        """Return the pause before the next try, None if there is no further try."""
        if not isinstance(error, ServiceUnavailable):
            return None
        self._patience = self._patience or Patience(self.options.service_timeout_s)
        try:
            return self._patience.pause_s(error)
        except ServiceUnavailable:
            return None

    def _nudge(self) -> None:
        self._nudged = True
        self._changed.notify_all()

    def _pause(self, pause_s: float) -> None:
        self._changed.wait_for(lambda: self._stopped or self._nudged, max(0.0, pause_s))


def _overdue(step: int, deadline_s: float | None, waits: WaitingAnswer | None) -> BatchOverdue:
    why = "the service has not answered"
    if waits is not None:
        missing = ", ".join(f"{client.name} (last seen {client.last_seen_s:.0f} s ago)" for client in waits.missing)
        why = f"{waits.reason}, blocked on {waits.blocked_on}" + (f"; missing: {missing}" if missing else "")
        why += f"; {waits.detail}" if waits.detail else ""
    detail = f"no batch of step {step} within deadline_s = {deadline_s:g}: {why}" if deadline_s is not None else why
    return BatchOverdue(detail, waits, name="deadline_s", value=waits and waits.reason, bound=deadline_s)


def _open_direct(client: HttpClient, redis_url: str | None) -> DirectBodies | None:
    if redis_url is None:
        return None
    try:
        from replaybuf.client.direct import DirectBodies  # loads redis, which other readers do not need
    except ModuleNotFoundError as error:
        raise MissingExtra("direct_redis_url", "direct") from error
    return DirectBodies(client, redis_url)


class BatchReader(StepReader[Batch]):
    """Reader of batches as numpy views (`replaybuf.wire.batch.Batch`)."""

    def read(self, body: Body) -> Batch:
        """Decode a body to views."""
        return read_batch(body)
