"""Reading the batches of a run, one rank's part of each step in order, the next one fetched while this one trains.

::

    attached = client.attach(dp_world_size=1)
    with BatchReader(client, attached.epoch, attached.step) as reader:
        for batch in reader:
            ...                       # train on batch.micro_batches
            reader.ack()              # by one rank; then write, load and publish the weights

One thread does all the fetching. It holds one batch at most, the one after that in training; what the strategy does not
let it have early it asks for again: every `poll_s`, when a step is acked here, and when the consumer comes for it.

Life: made -> `start` (by entering, or by the first batch) -> batches -> `stop` (from any thread or signal handler;
whoever waits for a batch is woken) -> `close` (stops, and waits for the thread). The iteration ends with the run and
with `stop`; every other error of `Client.fetch_batch` is raised from it, the first time that the batch is waited for.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from replaybuf.client.client import Client, Patience
from replaybuf.client.direct import Body, DirectBodies
from replaybuf.errors import Conflict, Invalid, RunFinished, ServiceUnavailable
from replaybuf.wire.batch import Batch, BatchMeta, read_batch
from replaybuf.wire.contract import WaitingAnswer

logger = logging.getLogger(__name__)


class OfMeta(Protocol):
    """A batch of any form that a reader hands out."""

    @property
    def meta(self) -> BatchMeta:
        """What the body says about itself."""


B = TypeVar("B", bound=OfMeta)

TELL_WAITING_EVERY_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """How to read.

    - `dp_rank`: whose part of each batch, below `dp_world_size`: how many ranks read. A batch packed for another number
      raises `Conflict`: with fewer readers than ranks a part of it would go untrained
    - `poll_s`: seconds from one question for a batch to the next; `wait_ms`: how long the service may hold each
      (0 = poll, else long-poll); `close` may have to wait for that long
    - `prefetch`: fetch the next batch while this one trains
    - `service_timeout_s`: how long the service may stay away while a batch is waited for
    - `close_timeout_s`: how long `close` waits for the thread
    - `on_waiting`: called in the thread with every answer that there is no batch yet, while one is waited for
    - `direct_redis_url`: fetch frames from this Redis (`replaybuf.client.direct`)

    Raises `Invalid` for a number outside its bound.
    """

    dp_rank: int = 0
    dp_world_size: int = 1
    poll_s: float = 0.5
    wait_ms: int = 0
    prefetch: bool = True
    service_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
    on_waiting: Callable[[WaitingAnswer], None] | None = None
    direct_redis_url: str | None = dataclasses.field(default=None, repr=False)  # it may hold a password

    def __post_init__(self) -> None:
        least = {"dp_rank": 0, "dp_world_size": 1, "wait_ms": 0, "service_timeout_s": 0, "close_timeout_s": 0}
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                value = getattr(self, name)
                raise Invalid(f"{name} is {value}; at least {bound} is needed", name=name, value=value, bound=bound)
        if self.dp_rank >= self.dp_world_size:
            raise Invalid(
                f"dp_rank is {self.dp_rank}; it must be below dp_world_size = {self.dp_world_size}",
                name="dp_rank",
                value=self.dp_rank,
                bound=self.dp_world_size,
            )
        if not self.poll_s > 0:
            raise Invalid(f"poll_s is {self.poll_s}; more than 0 is needed", name="poll_s", value=self.poll_s, bound=0)


DEFAULTS = ReaderOptions()


class StepReader(Generic[B]):
    """Iterator over the batches of one epoch from `step` on; a subclass says what `read` makes of a body.

    `step`: the next one to be handed out. `waiting`: why it is not there, None where it is or nobody asked yet.
    `waited_s`: seconds in which a batch was waited for, by reason. `finished`: the run has ended.
    """

    def __init__(self, client: Client, epoch: int, step: int, options: ReaderOptions = DEFAULTS) -> None:
        self.epoch = epoch
        self.step = self._first = step
        self.options = options
        self.waiting: WaitingAnswer | None = None
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.finished = False
        self._client = client
        url = options.direct_redis_url
        self._direct = DirectBodies(client, url) if url is not None else None
        self._changed = threading.Condition()
        self._wanted_since_s: float | None = None
        self._nudged = False
        self._parked = False
        self._stopped = False
        self._held: B | None = None
        self._failure: Exception | None = None
        self._patience: Patience | None = None
        self._told_s = -TELL_WAITING_EVERY_S
        self._thread = threading.Thread(target=self._work, name=f"batches of rank {options.dp_rank}", daemon=True)

    @abstractmethod
    def read(self, body: Body) -> B:
        """Make a batch of a body; called in the thread."""

    # ------------------------------------------------------------------ the consumer

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        """Return the batch of the next step, waiting for it."""
        self.start()
        with self._changed:
            if self.finished:
                raise StopIteration
            self._wanted_since_s, self._parked, self._patience = time.monotonic(), False, None
            self._nudge()
            self._changed.wait_for(lambda: self._held is not None or self._failure is not None or self._stopped)
            self._wanted_since_s = self.waiting = None
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

    def ack(self, feedback: dict[str, Any] | None = None) -> None:
        """Say that the batch handed out last is trained; what waits for that is asked for at once.

        Raises `Fenced`, `WrongStep`, `ServiceUnavailable`, `Invalid` before the first batch. Again is fine, and so is
        `Client.ack`.
        """
        if self.step == self._first:
            raise Invalid(f"ack before any batch: the first is that of step {self._first}", name="step", value=None)
        self._client.ack(self.step - 1, self.epoch, feedback)
        with self._changed:
            self._nudge()

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the thread, unless it was started before."""
        with self._changed:
            if self._thread.ident is None and not self._stopped:
                self._thread.start()

    def stop(self) -> None:
        """End the iteration, without waiting for anything."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop and wait for the thread. One that is held by the service for too long ends with its request."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(self.options.close_timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "reader still waits for the service after %.1f s; it ends with its request",
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
            began_s = time.monotonic()
            try:
                body = self._fetch(step)
                if isinstance(body, WaitingAnswer):
                    self._wait(body, began_s)
                else:
                    self._hold(self._checked(self.read(body)))
            except Exception as error:  # noqa: BLE001  # whatever it is, the consumer gets it
                self._fail(error)

    def _next_task(self) -> int | None:
        """Wait until there is something to fetch and return its step, None when the reader is stopped."""
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
                f"batch {batch.meta.step} is packed for dp_world_size = {packed}, the reader's is {reading}: attach "
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
        """Pause until it is time to ask again; a question that the service held has had part of its pause."""
        with self._changed:
            self.waiting, self._patience = waiting, None
            wanted = self._wanted_since_s is not None
        if wanted:
            self._tell(waiting)
        with self._changed:
            self._pause(self.options.poll_s - (time.monotonic() - began_s if self.options.wait_ms else 0.0))
            if self._wanted_since_s is not None:
                self.waited_s[waiting.reason] += time.monotonic() - max(began_s, self._wanted_since_s)

    def _fail(self, error: Exception) -> None:
        """Hand an error to a consumer that waits, unless the service may come back in time.

        What was asked for early only counts when it is asked for again.
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
        """Return the pause before the next try, None where there is none."""
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

    def _tell(self, waiting: WaitingAnswer) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_WAITING_EVERY_S:
            self._told_s = now_s
            logger.info(
                "waiting step=%d reason=%s have=%s need=%s blocked_on=%s",
                self.step,
                waiting.reason,
                waiting.have,
                waiting.need,
                waiting.blocked_on,
            )
        if self.options.on_waiting:
            self.options.on_waiting(waiting)


class BatchReader(StepReader[Batch]):
    """Reader of numpy views: `replaybuf.wire.batch.Batch`."""

    def read(self, body: Body) -> Batch:
        """Read a body into views."""
        return read_batch(body)
