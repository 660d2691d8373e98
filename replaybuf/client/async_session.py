"""Batches and sessions for an asyncio trainer. A thread fetches and decodes, so the event loop stays free.

A training loop:

    async with client.trainer(steps_done=0) as session:
        async for batch in session:
            ...
            await session.step_done(weights_uri="file:///weights/v000001", checkpoint=True)
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from replaybuf.client.http_client import AsyncHttpClient, HttpClient
from replaybuf.client.reader import DEFAULTS, BatchReader, HasMeta, ReaderOptions, StepReader
from replaybuf.client.session import TrainerSession, open_session
from replaybuf.wire.batch import Batch
from replaybuf.wire.contract import WaitingAnswer

B = TypeVar("B", bound=HasMeta)
P = ParamSpec("P")
T = TypeVar("T")


def _in_thread(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Make a coroutine of a method of the blocking reader or session; a thread runs it."""

    @functools.wraps(call)
    async def method(self: _AsyncBatches[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(call, self._batches, *args, **kwargs)

    return method


class _AsyncBatches(Generic[B]):
    """Batches of a blocking reader or session, awaited. A cancelled wait goes on, and the next one gets its batch."""

    def __init__(self, client: HttpClient, batches: StepReader[B] | TrainerSession[B]) -> None:
        self._client = client
        self._batches = batches
        self._waiting: asyncio.Task[B | None] | None = None

    def stop(self) -> None:
        """End the batches, and a session's repetition of calls, without waiting."""
        self._batches.stop()

    def __aiter__(self) -> AsyncIterator[B]:
        return self

    async def __anext__(self) -> B:
        """Wait for the batch of the next step. Raises what the reader raises."""
        if self._waiting is None:
            self._waiting = asyncio.create_task(asyncio.to_thread(next, self._batches, None))
        try:
            batch = await asyncio.shield(self._waiting)
        finally:
            if self._waiting.done():
                self._waiting = None
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._batches.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if self._waiting is not None:  # of a wait that was cancelled; nobody wants its result
            await asyncio.gather(self._waiting, return_exceptions=True)
        await asyncio.to_thread(self._batches.close)
        self._client.close()


class AsyncBatchReader(_AsyncBatches[Batch]):
    """`BatchReader` for an asyncio trainer, with the same arguments, batches and errors. Enter it to start it."""

    def __init__(self, client: AsyncHttpClient, epoch: int, step: int, options: ReaderOptions = DEFAULTS) -> None:
        blocking = client.make_blocking()
        self.reader = BatchReader(blocking, epoch, step, options)
        super().__init__(blocking, self.reader)

    ack = _in_thread(BatchReader.ack)


class AsyncTrainerSession(_AsyncBatches[Batch]):
    """`TrainerSession` for an asyncio trainer: the same calls, awaited. `session` is the blocking one."""

    def __init__(self, client: AsyncHttpClient, steps_done: int = 0, **options: Any) -> None:
        blocking = client.make_blocking()
        self.session = open_session(blocking, steps_done, **options)
        super().__init__(blocking, self.session)

    @property
    def epoch(self) -> int:
        """Epoch of this trainer. Raises `Invalid` before the session is entered."""
        return self.session.epoch

    @property
    def steps_done(self) -> int:
        """Steps that the trainer's weights have."""
        return self.session.steps_done

    @property
    def waiting(self) -> WaitingAnswer | None:
        """The newest answer of the service that there is no batch, while the trainer waits for one."""
        return self.session.waiting

    step_done = _in_thread(TrainerSession.step_done)
    ack = _in_thread(TrainerSession.ack)
    publish = _in_thread(TrainerSession.publish)
    publish_due = _in_thread(TrainerSession.publish_due)
    checkpoint = _in_thread(TrainerSession.checkpoint)
    confirm = _in_thread(TrainerSession.confirm)
