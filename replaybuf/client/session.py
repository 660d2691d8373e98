"""The session of a trainer: attach, batches, acks, versions and checkpoints of a run, in the order that loses nothing.

    with client.trainer(steps_done=0) as session:
        for batch in session:
            ...                      # train on batch.micro_batches, write and load the weights, write a checkpoint
            session.step_done(weights_uri="file:///weights/v000001", checkpoint=True)

`step_done` acks the step, then publishes the version that is due, then records the checkpoint. A trainer that was
killed between two of them starts with the steps of its newest checkpoint: what the run lacks is sent, and what the
checkpoint lacks is delivered again (`client.resume`).

With several ranks one session attaches, and those of the other ranks `join` it; only the first one reports.

A framework with batches of its own makes the session without a reader, and calls `fetch` for the bodies of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from replaybuf.client.http_client import HttpClient
from replaybuf.client.reader import DEFAULTS, BatchReader, HasMeta, ReaderOptions, StepReader
from replaybuf.client.resume import attach_at, confirm_trainer, settle_at
from replaybuf.client.retries import Retries
from replaybuf.errors import Invalid, counted
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.batch import Batch
from replaybuf.wire.contract import Attachment, WaitingAnswer

if TYPE_CHECKING:
    from replaybuf.wire.plan import Body

B = TypeVar("B", bound=HasMeta)
T = TypeVar("T")


class TrainerSession(Generic[B]):
    """One trainer of a run. Life: made -> `attach`, or `join` -> batches and reports -> `stop` -> `close`.

    Calls are repeated while the service is away, for at most `service_timeout_s`, then raise `ServiceUnavailable`.
    `stop`, from any thread or signal handler, ends the batches, and the repetitions with `Stopped`. A session whose run
    has a newer trainer raises `Fenced` from every call.

    - `steps_done`: steps that the trainer's weights have
    - `keep_checkpoints`: the newest checkpoints that stay resumable; None = the default of each call of the client
    - `open_reader`: makes the reader of an epoch from a step on; None = the caller fetches, or only reports
    - `options`: of `attach_at`, but `resume_step`
    """

    def __init__(
        self,
        client: HttpClient,
        open_reader: Callable[[int, int], StepReader[B]] | None = None,
        *,
        steps_done: int = 0,
        keep_checkpoints: int | None = None,
        service_timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        self.steps_done = steps_done
        self._client = client
        self._open_reader = open_reader
        self._keep = keep_checkpoints
        self._options = options
        self._retries = Retries(service_timeout_s)
        self._facts: RunFacts | None = None
        self._reader: StepReader[B] | None = None
        self._epoch: int | None = None
        self._attachment: Attachment | None = None
        self._published = 0  # newest version of the run without adapters
        self._being_written: int | None = None  # steps of a checkpoint that is not on disk yet
        self._unreported: tuple[int, int | None] | None = None  # steps of a checkpoint on disk, and how many to keep

    # ------------------------------------------------------------------ begin and end

    def attach(self, steps_done: int | None = None, **options: Any) -> Attachment:
        """Take the run over with the weights of `steps_done`, and report a checkpoint of them; 0 steps are none.

        What is given here replaces what the session was made with. Every older trainer is fenced. A session may attach
        again, such as after a rewind: it reports a checkpoint again whose report got no answer. Raises `WrongStep` for
        a checkpoint of another run.
        """
        steps = self.steps_done if steps_done is None else steps_done
        how = self._options | options
        attached = self.call(lambda: attach_at(self._client, steps, keep=self._keep, **how))
        self.join(attached.epoch, attached.step)
        self._attachment, self._published, self._being_written = attached, attached.published_version, None
        if self._unreported is not None and self._unreported[0] <= steps:
            self._report_checkpoint()
        self._unreported = None  # a later checkpoint is of steps that the run has taken back
        return attached

    def join(self, epoch: int, step: int) -> None:
        """Read the batches of `epoch` from `step` on, as another rank of the trainer that attached."""
        if epoch == self._epoch:
            return
        if self._facts is None:
            self.read_facts()
        self.close()  # the reader of the epoch before
        self._epoch, self.steps_done = epoch, step
        if self._open_reader is None:
            return
        self._reader = self._open_reader(epoch, step)
        if self._retries.stopped:  # before there was a reader
            self._reader.stop()

    def read_facts(self) -> RunFacts:
        """Read the facts of the run's configuration that a trainer needs, also before `attach`."""
        self._facts = self.call(self._client.get_run).facts()
        return self._facts

    @property
    def facts(self) -> RunFacts:
        """The facts as they were read last, `attach` at the latest: adapters may come and go while the run goes on."""
        return self.read_facts() if self._facts is None else self._facts

    def settle(self, steps_done: int | None = None) -> None:
        """Send what a trainer with nothing left to train owes the run: missing acks, the report of its checkpoint."""
        steps = self.steps_done if steps_done is None else steps_done
        self.call(lambda: settle_at(self._client, steps, keep=self._keep))

    def call(self, request: Callable[[], T]) -> T:
        """Make a request that may be repeated, for as long as the session's other calls. Raises `Stopped`."""
        return self._retries.call(request)

    def stop(self) -> None:
        """End the batches and the repetition of calls, without waiting."""
        self._retries.stop()
        if self._reader is not None:
            self._reader.stop()

    def close(self) -> None:
        """End the batches, and wait for the reader's thread as long as its options say. Reports may follow."""
        if self._reader is not None:
            self._reader.close()

    def __enter__(self) -> Self:
        if self._epoch is None:
            self.attach()
        if self._reader is not None:
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ batches

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._retries.stopped

    @property
    def reader(self) -> StepReader[B]:
        """The reader: `waiting` says why there is no batch yet, `finished` whether the run has ended.

        Raises `Invalid` before `attach`, and for a session without a reader.
        """
        _ = self.epoch
        if self._reader is None:
            raise Invalid("the session was made without a reader; give it open_reader, or `fetch`", name="open_reader")
        return self._reader

    @property
    def epoch(self) -> int:
        """Epoch of this trainer. Raises `Invalid` before `attach`."""
        if self._epoch is None:
            raise Invalid("the session has no trainer before `attach`", name="epoch")
        return self._epoch

    @property
    def attachment(self) -> Attachment:
        """The service's answer to `attach`. Raises `Invalid` before it, and on ranks that joined."""
        if self._attachment is None:
            raise Invalid("the session has no attachment before `attach`", name="epoch")
        return self._attachment

    @property
    def waiting(self) -> WaitingAnswer | None:
        """The newest answer of the service that there is no batch, while the trainer waits for one."""
        return self._reader.waiting if self._reader else None

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        """Wait for the batch of the next step. Raises what the reader raises."""
        return next(self.reader)

    def fetch(self, step: int, *, dp_rank: int = 0, wait_ms: int = 0) -> Body | WaitingAnswer:
        """Fetch the body of a rank, or why there is none yet, as `Client.fetch_batch` does."""
        return self.call(lambda: self._client.fetch_batch(step, self.epoch, dp_rank=dp_rank, wait_ms=wait_ms))

    # ------------------------------------------------------------------ reports

    def step_done(
        self,
        weights_uri: str | None = None,
        *,
        metrics: Mapping[str, float | None] | None = None,
        checkpoint: bool = False,
        feedback: dict[str, Any] | None = None,
    ) -> None:
        """Report that the newest batch is trained: ack, the version that is due, the checkpoint.

        A version is due after every `steps_per_publish` steps of the run; the engines have loaded it by now, or load it
        from `weights_uri`. `metrics`: at most 64 numbers of the step that people want to see, by name. `checkpoint`:
        the checkpoint of the steps done, this one included, is on disk. `feedback`: for the strategy. A run with
        adapters has no version for all of them: `publish` each. Raises `Invalid` for weights of a step after which no
        version is due.
        """
        due = not self.facts.adapters and self.reader.step % self.facts.steps_per_publish == 0
        if weights_uri is not None and not due:
            every, adapters = self.facts.steps_per_publish, ", ".join(sorted(self.facts.adapters)) or "none"
            raise Invalid(
                f"weights_uri is {weights_uri!r} after {counted(self.reader.step, 'step')}, and no version is due; "
                f"steps_per_publish is {every}, adapters: {adapters}. Leave it out, or publish an adapter by its name",
                name="weights_uri",
                value=weights_uri,
                bound=every,
            )
        self.ack(feedback, metrics)
        if due:
            self.publish(weights_uri)
        if checkpoint:
            self.checkpoint()

    def ack(
        self,
        feedback: dict[str, Any] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        *,
        steps: int | None = None,
    ) -> None:
        """Report that `steps` are trained; None = those up to the newest batch. A repetition does no harm.

        A framework that fetches batches in another thread, or trains several steps between two reports, names the
        steps: each one since the last ack is acked, the last one with `feedback` and `metrics`.
        """
        if steps is None:
            self.call(lambda: self.reader.ack(feedback, metrics))
            self.steps_done = self.reader.step
            return
        for step in range(self.steps_done, steps):
            numbers = (feedback, metrics) if step == steps - 1 else (None, None)
            self.call(functools.partial(self._client.ack, step, self.epoch, *numbers))
            self.steps_done = step + 1

    def publish(self, weights_uri: str | None = None, version: int | None = None, adapter: str = "") -> None:
        """Announce a version of an adapter; None = the newest one of the steps done, as after a resume."""
        number = self._newest_version if version is None else version
        self.call(lambda: self._client.publish_policy(number, self.epoch, weights_uri, adapter))
        if not adapter:
            self._published = number

    def publish_due(self, weights_uri: str | None = None) -> None:
        """Announce the newest version of the steps done, unless the run has it: the engines have loaded it."""
        if self._newest_version > self._published:
            self.publish(weights_uri)

    @property
    def _newest_version(self) -> int:
        return self.steps_done // self.facts.steps_per_publish

    def checkpoint(self, steps: int | None = None, *, written: bool = True, keep: int | None = None) -> None:
        """Record that the checkpoint of `steps` is on disk; None = of the steps done. Frees what no resume needs.

        `written=False`: it is written in the background, and complete at the next save; so that call records it.
        `keep`: instead of the session's `keep_checkpoints`.
        """
        number = self.steps_done if steps is None else steps
        complete, self._being_written = (number, None) if written else (self._being_written, number)
        if complete is not None:
            self._unreported = complete, self._keep if keep is None else keep
            self._report_checkpoint()

    def _report_checkpoint(self) -> None:
        """Report the newest checkpoint on disk; it stays unreported until the service has answered."""
        if self._unreported is not None:
            steps, keep = self._unreported
            self.call(lambda: self._client.checkpoint(steps, self.epoch, keep=keep))
            self._unreported = None

    def confirm(self) -> None:
        """Ask once whether this trainer has the run, right before it deletes or replaces files. Raises `Fenced`."""
        confirm_trainer(self._client, self.epoch, min(self.facts.adapters, default=""))


def open_session(
    client: HttpClient,
    steps_done: int = 0,
    *,
    keep_checkpoints: int | None = None,
    reader: ReaderOptions = DEFAULTS,
    **options: Any,
) -> TrainerSession[Batch]:
    """Make a session with numpy batches; see `Client.trainer`."""
    return TrainerSession(
        client,
        lambda epoch, step: BatchReader(client, epoch, step, reader),
        steps_done=steps_done,
        keep_checkpoints=keep_checkpoints,
        service_timeout_s=reader.service_timeout_s,
        dp_world_size=reader.dp_world_size,
        **options,
    )
