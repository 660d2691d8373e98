"""The session of a trainer: attach, batches, acks, versions and checkpoints of a run, in the order that loses nothing.

::

    with client.trainer(steps_done=0) as session:
        for batch in session:
            ...                      # train on batch.micro_batches, write and load the weights, write a checkpoint
            session.step_done(weights_uri="file:///weights/v000001", checkpoint=True)

`step_done` acks the step, then publishes the version that is due, then records the checkpoint. A trainer that was
killed between two of them starts with the steps of its newest checkpoint: what the run lacks is sent, and what the
checkpoint lacks is delivered again (`client.resume`).

With several ranks one session attaches, and those of the other ranks `join` it; only the first one reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from replaybuf.client.http_client import HttpClient
from replaybuf.client.reader import DEFAULTS, BatchReader, HasMeta, ReaderOptions, StepReader
from replaybuf.client.resume import attach_at, confirm_trainer, settle_at
from replaybuf.client.retries import Retries
from replaybuf.errors import Invalid, counted
from replaybuf.wire.batch import Batch
from replaybuf.wire.contract import Attachment, WaitingAnswer
from replaybuf.wire.run_status import RunFacts

B = TypeVar("B", bound=HasMeta)


class TrainerSession(Generic[B]):
    """One trainer of a run. Life: made -> `attach`, or `join` -> batches and reports -> `stop` -> `close`.

    Calls are repeated while the service is away, for at most `service_timeout_s`, then raise `ServiceUnavailable`.
    `stop`, from any thread or signal handler, ends the batches, and the repetitions with `Stopped`. A session whose run
    has a newer trainer raises `Fenced` from every call.

    - `steps_done`: steps that the trainer's weights have
    - `keep_checkpoints`: the newest checkpoints that stay resumable; None = the default of each call of the client
    - `open_reader`: makes the reader of an epoch from a step on
    - `options`: of `Client.attach`, but `resume_step`
    """

    def __init__(
        self,
        client: HttpClient,
        open_reader: Callable[[int, int], StepReader[B]],
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

    # ------------------------------------------------------------------ begin and end

    def attach(self, steps_done: int | None = None, **options: Any) -> Attachment:
        """Take the run over with the weights of `steps_done`, and report a checkpoint of them; 0 steps are none.

        What is given here replaces what the session was made with. Every older trainer is fenced. Raises `WrongStep`
        for a checkpoint of another run.
        """
        steps = self.steps_done if steps_done is None else steps_done
        how = self._options | options
        attached = self._retries.call(lambda: attach_at(self._client, steps, keep=self._keep, **how))
        self.join(attached.epoch, attached.step)
        return attached

    def join(self, epoch: int, step: int) -> None:
        """Read the batches of `epoch` from `step` on, as another rank of the trainer that attached."""
        if self._reader is not None:
            return
        if self._facts is None:
            self.read_facts()
        self.steps_done = step
        self._reader = self._open_reader(epoch, step)
        if self._retries.stopped:  # before there was a reader
            self._reader.stop()

    def read_facts(self) -> RunFacts:
        """Read the facts of the run's configuration that a trainer needs, also before `attach`."""
        self._facts = self._retries.call(self._client.get_run).facts()
        return self._facts

    @property
    def facts(self) -> RunFacts:
        """The facts as they were read last, `attach` at the latest: adapters may come and go while the run goes on."""
        return self.read_facts() if self._facts is None else self._facts

    def settle(self, steps_done: int | None = None) -> None:
        """Send what a trainer with nothing left to train owes the run: missing acks, the report of its checkpoint."""
        steps = self.steps_done if steps_done is None else steps_done
        self._retries.call(lambda: settle_at(self._client, steps, keep=self._keep))

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
        if self._reader is None:
            self.attach()
        self.reader.start()
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
        """The reader: `waiting` says why there is no batch yet, `finished` whether the run has ended."""
        if self._reader is None:
            raise Invalid("the session has no trainer before `attach`", name="epoch")
        return self._reader

    @property
    def epoch(self) -> int:
        """Epoch of this trainer. Raises `Invalid` before `attach`."""
        return self.reader.epoch

    @property
    def waiting(self) -> WaitingAnswer | None:
        """The newest answer of the service that there is no batch, while the trainer waits for one."""
        return self._reader.waiting if self._reader else None

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        """Wait for the batch of the next step. Raises what the reader raises."""
        return next(self.reader)

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

        A framework that fetches batches ahead in another thread names the steps, and acks each of them.
        """
        if steps is None:
            self._retries.call(lambda: self.reader.ack(feedback, metrics))
            self.steps_done = self.reader.step
        else:
            self._retries.call(lambda: self._client.ack(steps - 1, self.epoch, feedback, metrics))
            self.steps_done = steps

    def publish(self, weights_uri: str | None = None, version: int | None = None, adapter: str = "") -> None:
        """Announce a version of an adapter; None = the newest one of the steps done, as after a resume."""
        number = self.steps_done // self.facts.steps_per_publish if version is None else version
        self._retries.call(lambda: self._client.publish_policy(number, self.epoch, weights_uri, adapter))

    def checkpoint(self, steps: int | None = None) -> None:
        """Record that the checkpoint of `steps` is on disk; None = of the steps done. Frees what no resume needs."""
        number = self.steps_done if steps is None else steps
        self._retries.call(lambda: self._client.checkpoint(number, self.epoch, keep=self._keep))

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
