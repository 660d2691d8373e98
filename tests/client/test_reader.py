"""Batch reader: requests, reports while it waits, and its end."""

from __future__ import annotations

import itertools
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from replaybuf.client.client import Client
from replaybuf.client.reader import BatchReader, ReaderOptions
from replaybuf.errors import (
    BatchOverdue,
    Conflict,
    Fenced,
    Gone,
    Invalid,
    Malformed,
    RunFinished,
    ServiceUnavailable,
    WrongStep,
)
from replaybuf.wire.batch import encode_batch
from replaybuf.wire.contract import MissingClient, WaitingAnswer
from replaybuf.wire.plan import Body
from tests.builders import batch_meta, waiting_answer
from tests.conftest import RunClient, ServeProcess, group
from tests.waiting import eventually

EPOCH = 7
TIMEOUT_S = 30.0
NEVER_S = 3600.0
"""A pause longer than any test."""
WAIT = waiting_answer("awaiting_ack", blocked_on="trainer")


def body(step: int) -> bytes:
    """Build the body of a step without rollouts."""
    return bytes(encode_batch(batch_meta(step=step, dp_rank=3, dp_world_size=4), [[]]))


class ScriptedClient:
    """Answer requests for a step with the answers `put` for it, in order; wait for them.

    `requested` gets the step of every request.
    """

    def __init__(self) -> None:
        self.requested: queue.Queue[int] = queue.Queue()
        self.acked: list[int] = []
        self.wait_ms: list[int] = []
        self._answers: defaultdict[int, queue.Queue[bytes | WaitingAnswer | Exception]] = defaultdict(queue.Queue)

    def put(self, step: int, *answers: bytes | WaitingAnswer | Exception) -> None:
        """Add answers for a step."""
        for answer in answers:
            self._answers[step].put(answer)

    def fetch_batch(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> bytes | WaitingAnswer:
        """Record the request; return or raise the next answer."""
        assert (epoch, dp_rank) == (EPOCH, 3)
        self.wait_ms.append(wait_ms)
        self.requested.put(step)
        answer = self._answers[step].get(timeout=TIMEOUT_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ack(self, step: int, epoch: int, feedback: object = None, metrics: object = None) -> None:
        """Record the step."""
        assert epoch == EPOCH
        self.acked.append(step)

    def next_request(self) -> int:
        """Wait for the next request."""
        return self.requested.get(timeout=TIMEOUT_S)


MakeReader = Callable[..., BatchReader]


@pytest.fixture
def client() -> ScriptedClient:
    """Make a client without answers."""
    return ScriptedClient()


@pytest.fixture
def make_reader(client: ScriptedClient) -> Iterator[MakeReader]:
    """Make readers of rank 3 from step 0 that poll every `NEVER_S`; stop their threads at the end."""
    made: list[BatchReader] = []

    def make(clock: Callable[[], float] = time.monotonic, **fields: object) -> BatchReader:
        options = {"dp_rank": 3, "dp_world_size": 4, "poll_s": NEVER_S, "close_timeout_s": TIMEOUT_S} | fields
        made.append(BatchReader(cast(Client, client), EPOCH, 0, ReaderOptions(**options), clock))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for reader in made:
        reader.stop()
        client.put(reader.step, WAIT)  # releases a request that still waits
        reader.close()
        assert not reader._thread.is_alive()


def test_batches_come_in_the_order_of_their_steps_until_the_run_ends(
    client: ScriptedClient, make_reader: MakeReader
) -> None:
    reader = make_reader()
    for step in range(3):
        client.put(step, body(step))
    client.put(3, RunFinished("finished"), RunFinished("finished"))
    assert [batch.meta.step for batch in reader] == [0, 1, 2]
    assert reader.finished and reader.step == 3
    assert next(reader, None) is None


def test_one_batch_is_prefetched(client: ScriptedClient, make_reader: MakeReader) -> None:
    """Step 1 is fetched while step 0 trains; step 2 is requested after the trainer got step 1."""
    reader = make_reader()
    for step in range(3):
        client.put(step, body(step))
    assert next(reader).meta.step == 0
    assert [client.next_request(), client.next_request()] == [0, 1]
    with reader._changed:
        assert reader._changed.wait_for(lambda: reader._held is not None, TIMEOUT_S)
        assert not reader._may_fetch()
    assert client.requested.empty()
    assert next(reader).meta.step == 1
    assert client.next_request() == 2


def test_without_prefetch_a_batch_is_requested_when_the_trainer_needs_it(
    client: ScriptedClient, make_reader: MakeReader
) -> None:
    reader = make_reader(prefetch=False)
    client.put(0, body(0))
    client.put(1, body(1))
    next(reader)
    assert not reader._may_fetch()
    next(reader)
    assert list(client.requested.queue) == [0, 1]


def test_an_ack_ends_the_pause_before_the_next_request(client: ScriptedClient, make_reader: MakeReader) -> None:
    """The pause also ends when the trainer waits for the batch."""
    reader = make_reader()
    client.put(0, body(0))
    client.put(1, WAIT, WAIT, body(1))
    next(reader)
    assert [client.next_request(), client.next_request()] == [0, 1]
    reader.ack({"loss": 1.0})
    assert (client.acked, client.next_request()) == ([0], 1)
    assert next(reader).meta.step == 1


def test_each_request_asks_for_a_long_poll_of_wait_ms(client: ScriptedClient, make_reader: MakeReader) -> None:
    """An early answer must not make the reader spin."""
    reader = make_reader(wait_ms=250)
    client.put(0, WAIT, body(0))
    reader.start()
    assert client.next_request() == 0
    client.put(0, WAIT)
    next(reader)
    assert client.wait_ms[:2] == [250, 250]


def test_a_wait_is_reported_with_its_reason(
    client: ScriptedClient, make_reader: MakeReader, caplog: pytest.LogCaptureFixture
) -> None:
    """The callback gets every answer, the log gets some, and `waited_s` sums the time by reason."""
    reported: list[str] = []
    seen: list[str | None] = []

    def on_waiting(waiting: WaitingAnswer) -> None:
        reported.append(waiting.reason)
        seen.append(reader.waiting.reason if reader.waiting else None)

    reader = make_reader(poll_s=0.01, on_waiting=on_waiting)
    client.put(0, WAIT, WAIT, waiting_answer("no_groups"), body(0))
    with caplog.at_level("INFO"):
        next(reader)
    assert reported[-2:] == seen[-2:] == ["awaiting_ack", "no_groups"]
    assert reader.waiting is None
    assert reader.waited_s["no_groups"] >= 0.01
    assert [line.split()[2] for line in caplog.messages if line.startswith("waiting step=0")] == [
        "reason=awaiting_ack",
        "reason=no_groups",
    ]


def test_a_long_wait_logs_a_warning_after_10_s_and_then_less_often(
    client: ScriptedClient, make_reader: MakeReader, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are 5 s apart."""
    now_s = itertools.count(0, 5)
    times: list[float] = [0.0]

    def answer(waiting: WaitingAnswer) -> None:
        times[0] = next(now_s)

    reader = make_reader(poll_s=1e-6, on_waiting=answer, clock=lambda: times[0])
    client.put(0, *[WAIT] * 200, body(0))
    with caplog.at_level("WARNING"):
        next(reader)
    waited_s = [int(line.rpartition("waited_s=")[2]) for line in caplog.messages]
    assert waited_s == [10, 30, 70, 150, 310, 610, 910]
    assert "waiting step=0 reason=awaiting_ack blocked_on=trainer have=Amount(groups=0" in caplog.messages[0]


@pytest.mark.parametrize("error", [Fenced("newer"), Gone("freed"), WrongStep("no"), Malformed("odd")])
def test_an_error_is_raised_to_the_trainer(client: ScriptedClient, make_reader: MakeReader, error: Exception) -> None:
    reader = make_reader(prefetch=False)
    client.put(0, error)
    with pytest.raises(type(error), match=str(error)):
        next(reader)


@pytest.mark.parametrize("error", [WrongStep("early"), ServiceUnavailable("down"), RunFinished("too soon")])
def test_an_error_of_a_prefetch_is_ignored(client: ScriptedClient, make_reader: MakeReader, error: Exception) -> None:
    """The reader requests the batch again when the trainer needs it."""
    reader = make_reader()
    client.put(0, body(0))
    client.put(1, error)
    next(reader)
    eventually(lambda: reader._parked, TIMEOUT_S)
    client.put(1, body(1))
    assert next(reader).meta.step == 1


def test_the_reader_retries_an_unavailable_service_for_service_timeout_s(
    client: ScriptedClient, make_reader: MakeReader
) -> None:
    reader = make_reader(prefetch=False)
    client.put(0, ServiceUnavailable("down", retry_after_s=0.0), body(0))
    assert next(reader).meta.step == 0
    impatient = make_reader(service_timeout_s=0.0, prefetch=False)
    client.put(0, ServiceUnavailable("still down"))
    with pytest.raises(ServiceUnavailable, match="still down"):
        next(impatient)


def test_a_body_that_does_not_decode_raises_malformed_to_the_trainer(
    client: ScriptedClient, make_reader: MakeReader
) -> None:
    """The error crosses from the reader's thread."""
    reader = make_reader(prefetch=False)
    client.put(0, b"no body")
    with pytest.raises(Malformed):
        next(reader)


def test_stop_ends_a_wait_for_a_batch(client: ScriptedClient, make_reader: MakeReader) -> None:
    stopped: list[BatchReader] = []
    reader = make_reader(on_waiting=lambda _: stopped[0].stop())
    stopped.append(reader)
    client.put(0, WAIT, WAIT)
    assert list(reader) == []
    assert not reader.finished
    assert next(reader, None) is None


def test_close_waits_at_most_close_timeout_s_for_a_held_request(
    client: ScriptedClient, make_reader: MakeReader, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader logs it; its thread ends with the request."""
    reader = make_reader(close_timeout_s=0.0)
    with reader:
        client.next_request()
    assert "still waits for the service" in caplog.text
    client.put(0, body(0))
    reader._thread.join(TIMEOUT_S)
    assert not reader._thread.is_alive()


def test_an_unused_reader_closes(make_reader: MakeReader) -> None:
    reader = make_reader()
    reader.close()
    assert next(reader, None) is None


# ---------------------------------------------------------------------- on a real service


@pytest.mark.parametrize("strategy", ["on-policy", "one-step-off-policy"])
def test_readers_get_every_batch_of_a_run(run: RunClient, service: ServeProcess, strategy: str) -> None:
    """Rank 0 polls and rank 1 uses long polls."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 16}, strategy={"name": strategy}, max_steps=3)
    steps: dict[int, list[int]] = {0: [], 1: []}
    with Client(service.url, run.run) as client:
        attached = client.attach(dp_world_size=2)

        def options(rank: int) -> ReaderOptions:
            return ReaderOptions(dp_rank=rank, dp_world_size=2, poll_s=0.05, wait_ms=500 * rank)

        with (
            BatchReader(client, attached.epoch, attached.step, options(0)) as first,
            BatchReader(client, attached.epoch, attached.step, options(1)) as second,
        ):
            run.append(group("g0"))
            for step, batches in enumerate(zip(first, second, strict=True)):
                for rank, batch in enumerate(batches):
                    assert (batch.meta.step, batch.meta.dp_rank) == (step, rank)
                    steps[rank].append(batch.meta.step)
                first.ack()
                client.publish_policy(step + 1, attached.epoch)
                if step < 2:
                    run.append(group(f"g{step + 1}", version=step + 1))
            assert first.finished
            assert second.finished or next(second, None) is None
    assert steps == {0: [0, 1, 2], 1: [0, 1, 2]}


def test_a_reader_with_a_deadline_says_why_no_batch_came(run: RunClient, service: ServeProcess) -> None:
    """It may be asked again: the batch of the same step is returned once it is there."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    with Client(service.url, run.run) as client:
        options = ReaderOptions(poll_s=0.05, deadline_s=0.5, on_waiting=lambda _: None)
        with BatchReader(client, epoch, 0, options) as reader:
            with pytest.raises(BatchOverdue, match="no batch of step 0 within deadline_s") as raised:
                next(reader)
            assert raised.value.bound == 0.5
            run.append(group("a"))
            assert eventually(lambda: _next(reader), within_s=60.0).meta.step == 0


def _next(reader: BatchReader) -> Any:
    """Return the next batch, None if it is overdue."""
    try:
        return next(reader)
    except BatchOverdue:
        return None


def test_the_error_of_a_deadline_names_the_reason_and_who_is_missing(
    client: ScriptedClient, make_reader: MakeReader
) -> None:
    missing = [MissingClient(name="host-1", last_seen_s=31.0)]
    reader = make_reader(deadline_s=2.0)
    client.put(0, waiting_answer("no_producers", missing=missing))
    with pytest.raises(BatchOverdue) as raised:
        next(reader)
    assert "no_producers, blocked on producers; missing: host-1 (last seen 31 s ago)" in raised.value.detail
    assert raised.value.waiting.missing == missing


def test_a_reader_is_fenced_when_another_trainer_attaches(run: RunClient, service: ServeProcess) -> None:
    run.put(batch={"groups_per_batch": 1})
    with Client(service.url, run.run) as client:
        attached = client.attach()
        taken: list[int] = []
        options = ReaderOptions(poll_s=0.05, on_waiting=lambda _: taken.append(taken[0] if taken else run.attach()))
        with BatchReader(client, attached.epoch, attached.step, options) as reader, pytest.raises(Fenced):
            next(reader)


def test_a_batch_packed_for_another_number_of_ranks_is_rejected(run: RunClient, service: ServeProcess) -> None:
    """With fewer readers than ranks, part of every batch would not be trained."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    with Client(service.url, run.run) as client:
        attached = client.attach(dp_world_size=2)
        for options in (ReaderOptions(), ReaderOptions(dp_world_size=1), ReaderOptions(dp_rank=1, dp_world_size=3)):
            expected = rf"reader is {options.dp_world_size}; batch 0 is packed for 2\. Attach with"
            rejected = pytest.raises(Conflict, match=expected)
            with BatchReader(client, attached.epoch, 0, options) as reader, rejected:
                next(reader)
        with BatchReader(client, attached.epoch, 0, ReaderOptions(dp_world_size=2)) as two:
            assert next(two).meta.dp_world_size == 2


def test_a_body_may_be_any_bytes_like_object() -> None:
    """Direct mode builds memory views."""
    reader = BatchReader(cast(Client, ScriptedClient()), EPOCH, 0)
    bodies: list[Body] = [body(0), memoryview(body(0))]
    assert [reader.read(body).meta.step for body in bodies] == [0, 0]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"poll_s": 0.0}, "poll_s is 0.0; it must be above 0"),
        ({"deadline_s": 0.0}, "deadline_s is 0.0; it must be above 0"),
        ({"wait_ms": -1}, "wait_ms is -1; the minimum is 0"),
        ({"dp_rank": 1}, "dp_rank is 1; it must be below dp_world_size = 1"),
        ({"dp_rank": 2, "dp_world_size": 2}, "dp_rank is 2; it must be below dp_world_size = 2"),
        ({"dp_world_size": 0}, "dp_world_size is 0; the minimum is 1"),
        ({"service_timeout_s": float("nan")}, "service_timeout_s is nan; the minimum is 0"),
    ],
)
def test_an_option_outside_its_bound_is_rejected(option: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        ReaderOptions(**option)


@pytest.mark.parametrize("step", [0, 7])
def test_an_ack_before_the_first_batch_is_rejected(step: int) -> None:
    """A resumed trainer would otherwise ack the previous step again, without an error."""
    with pytest.raises(Invalid, match=f"ack before the batch of step {step}; get that batch first"):
        BatchReader(cast(Client, ScriptedClient()), EPOCH, step).ack()
