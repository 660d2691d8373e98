"""The reader of batches: what it asks for and when, what it says while it waits, and how it ends."""

from __future__ import annotations

import itertools
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from replaybuf.client.client import Client
from replaybuf.client.direct import Body
from replaybuf.client.reader import BatchReader, ReaderOptions
from replaybuf.errors import Conflict, Fenced, Gone, Invalid, Malformed, RunFinished, ServiceUnavailable, WrongStep
from replaybuf.wire.batch import encode_batch
from replaybuf.wire.contract import WaitingAnswer
from tests.builders import batch_meta, waiting_answer
from tests.conftest import RunClient, ServeProcess, group
from tests.waiting import eventually

EPOCH = 7
TIMEOUT_S = 30.0
NEVER_S = 3600.0
"""A pause that no test waits for."""
WAIT = waiting_answer("awaiting_ack", blocked_on="trainer")


def body(step: int) -> bytes:
    """The body of a step without rollouts."""
    return bytes(encode_batch(batch_meta(step=step, dp_rank=3, dp_world_size=4), [[]]))


class ScriptedClient:
    """Answers every question with what was `put` for its step, in order; it waits for that to be there.

    `asked` gets the step of every question.
    """

    def __init__(self) -> None:
        self.asked: queue.Queue[int] = queue.Queue()
        self.acked: list[int] = []
        self.wait_ms: list[int] = []
        self._answers: defaultdict[int, queue.Queue[bytes | WaitingAnswer | Exception]] = defaultdict(queue.Queue)

    def put(self, step: int, *answers: bytes | WaitingAnswer | Exception) -> None:
        """Add answers for a step."""
        for answer in answers:
            self._answers[step].put(answer)

    def fetch_batch(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> bytes | WaitingAnswer:
        """Answer."""
        assert (epoch, dp_rank) == (EPOCH, 3)
        self.wait_ms.append(wait_ms)
        self.asked.put(step)
        answer = self._answers[step].get(timeout=TIMEOUT_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ack(self, step: int, epoch: int, feedback: object = None) -> None:
        """Note it."""
        assert epoch == EPOCH
        self.acked.append(step)

    def next_asked(self) -> int:
        """Wait for the next question."""
        return self.asked.get(timeout=TIMEOUT_S)


Reading = Callable[..., BatchReader]


@pytest.fixture
def client() -> ScriptedClient:
    """A client without answers."""
    return ScriptedClient()


@pytest.fixture
def reading(client: ScriptedClient) -> Iterator[Reading]:
    """Make a reader of rank 3 from step 0 on that polls `NEVER_S` apart; it leaves no thread behind."""
    made: list[BatchReader] = []

    def make(clock: Callable[[], float] = time.monotonic, **fields: object) -> BatchReader:
        options = {"dp_rank": 3, "dp_world_size": 4, "poll_s": NEVER_S, "close_timeout_s": TIMEOUT_S} | fields
        made.append(BatchReader(cast(Client, client), EPOCH, 0, ReaderOptions(**options), clock))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for reader in made:
        reader.stop()
        client.put(reader.step, WAIT)  # lets a question go that is still held
        reader.close()
        assert not reader._thread.is_alive()


def test_batches_come_in_the_order_of_their_steps_until_the_run_ends(client: ScriptedClient, reading: Reading) -> None:
    """And not one after that."""
    reader = reading()
    for step in range(3):
        client.put(step, body(step))
    client.put(3, RunFinished("finished"), RunFinished("finished"))
    assert [batch.meta.step for batch in reader] == [0, 1, 2]
    assert reader.finished and reader.step == 3
    assert next(reader, None) is None


def test_one_batch_is_fetched_ahead_and_no_more(client: ScriptedClient, reading: Reading) -> None:
    """While step 0 trains, step 1 comes; step 2 is asked for when step 1 is taken."""
    reader = reading()
    for step in range(3):
        client.put(step, body(step))
    assert next(reader).meta.step == 0
    assert [client.next_asked(), client.next_asked()] == [0, 1]
    with reader._changed:
        assert reader._changed.wait_for(lambda: reader._held is not None, TIMEOUT_S)
        assert not reader._may_fetch()
    assert client.asked.empty()
    assert next(reader).meta.step == 1
    assert client.next_asked() == 2


def test_without_prefetch_nothing_is_asked_before_it_is_wanted(client: ScriptedClient, reading: Reading) -> None:
    reader = reading(prefetch=False)
    client.put(0, body(0))
    client.put(1, body(1))
    next(reader)
    assert not reader._may_fetch()
    next(reader)
    assert list(client.asked.queue) == [0, 1]


def test_a_batch_that_an_ack_frees_is_asked_for_at_once(client: ScriptedClient, reading: Reading) -> None:
    """And one that is waited for is asked for at once too, not when its pause is over."""
    reader = reading()
    client.put(0, body(0))
    client.put(1, WAIT, WAIT, body(1))
    next(reader)
    assert [client.next_asked(), client.next_asked()] == [0, 1]
    reader.ack({"loss": 1.0})
    assert (client.acked, client.next_asked()) == ([0], 1)
    assert next(reader).meta.step == 1


def test_a_question_is_held_as_long_as_asked(client: ScriptedClient, reading: Reading) -> None:
    """Long-poll: the service holds it; an answer that comes sooner is no reason to ask in a hot loop."""
    reader = reading(wait_ms=250)
    client.put(0, WAIT, body(0))
    reader.start()
    assert client.next_asked() == 0
    client.put(0, WAIT)
    next(reader)
    assert client.wait_ms[:2] == [250, 250]


def test_a_wait_is_reported_with_its_reason(
    client: ScriptedClient, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    """To the callback at every answer, to the log now and then, and counted by reason."""
    told: list[str] = []
    seen: list[str | None] = []

    def on_waiting(waiting: WaitingAnswer) -> None:
        told.append(waiting.reason)
        seen.append(reader.waiting.reason if reader.waiting else None)

    reader = reading(poll_s=0.01, on_waiting=on_waiting)
    client.put(0, WAIT, WAIT, waiting_answer("no_groups"), body(0))
    with caplog.at_level("INFO"):
        next(reader)
    assert told[-2:] == seen[-2:] == ["awaiting_ack", "no_groups"]
    assert reader.waiting is None
    assert reader.waited_s["no_groups"] >= 0.01
    assert [line.split()[2] for line in caplog.messages if line.startswith("waiting step=0")] == [
        "reason=awaiting_ack",
        "reason=no_groups",
    ]


def test_a_long_wait_is_logged_as_a_warning_after_10_s_and_then_with_growing_gaps(
    client: ScriptedClient, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait is visible without INFO; each answer comes 5 s after the one before."""
    now_s = itertools.count(0, 5)
    times: list[float] = [0.0]

    def answer(waiting: WaitingAnswer) -> None:
        times[0] = next(now_s)

    reader = reading(poll_s=1e-6, on_waiting=answer, clock=lambda: times[0])
    client.put(0, *[WAIT] * 200, body(0))
    with caplog.at_level("WARNING"):
        next(reader)
    waited_s = [int(line.rpartition("waited_s=")[2]) for line in caplog.messages]
    assert waited_s == [10, 30, 70, 150, 310, 610, 910]
    assert "waiting step=0 reason=awaiting_ack blocked_on=trainer have=Amount(groups=0" in caplog.messages[0]


@pytest.mark.parametrize("error", [Fenced("newer"), Gone("freed"), WrongStep("no"), Malformed("odd")])
def test_an_error_is_raised_where_the_batch_is_waited_for(
    client: ScriptedClient, reading: Reading, error: Exception
) -> None:
    reader = reading(prefetch=False)
    client.put(0, error)
    with pytest.raises(type(error), match=str(error)):
        next(reader)


@pytest.mark.parametrize("error", [WrongStep("early"), ServiceUnavailable("away"), RunFinished("too soon")])
def test_an_error_of_a_question_asked_early_does_not_count(
    client: ScriptedClient, reading: Reading, error: Exception
) -> None:
    """It is asked again when it is wanted."""
    reader = reading()
    client.put(0, body(0))
    client.put(1, error)
    next(reader)
    eventually(lambda: reader._parked, TIMEOUT_S)
    client.put(1, body(1))
    assert next(reader).meta.step == 1


def test_a_service_that_is_away_is_waited_for_and_in_the_end_given_up(client: ScriptedClient, reading: Reading) -> None:
    reader = reading(prefetch=False)
    client.put(0, ServiceUnavailable("away", retry_after_s=0.0), body(0))
    assert next(reader).meta.step == 0
    hasty = reading(service_timeout_s=0.0, prefetch=False)
    client.put(0, ServiceUnavailable("away for good"))
    with pytest.raises(ServiceUnavailable, match="away for good"):
        next(hasty)


def test_a_body_that_does_not_decode_is_an_error_of_the_consumer(client: ScriptedClient, reading: Reading) -> None:
    """Whatever goes wrong in the thread."""
    reader = reading(prefetch=False)
    client.put(0, b"no body")
    with pytest.raises(Malformed):
        next(reader)


def test_stop_wakes_who_waits_for_a_batch(client: ScriptedClient, reading: Reading) -> None:
    """The iteration ends, and stays ended."""
    stopped: list[BatchReader] = []
    reader = reading(on_waiting=lambda _: stopped[0].stop())
    stopped.append(reader)
    client.put(0, WAIT, WAIT)
    assert list(reader) == []
    assert not reader.finished
    assert next(reader, None) is None


def test_close_waits_at_most_close_timeout_s_for_a_held_request(
    client: ScriptedClient, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so; the thread ends with the question."""
    reader = reading(close_timeout_s=0.0)
    with reader:
        client.next_asked()
    assert "still waits for the service" in caplog.text
    client.put(0, body(0))
    reader._thread.join(TIMEOUT_S)
    assert not reader._thread.is_alive()


def test_a_reader_that_never_read_closes(reading: Reading) -> None:
    reader = reading()
    reader.close()
    assert next(reader, None) is None


# ---------------------------------------------------------------------- on a real service


@pytest.mark.parametrize("strategy", ["on-policy", "one-step-off-policy"])
def test_a_run_is_read_to_its_end(run: RunClient, service: ServeProcess, strategy: str) -> None:
    """With look-ahead and without, polled and held; every rank gets its part of every batch."""
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
                run.append(group(f"g{step + 1}", version=step + 1))
            assert first.finished
            assert second.finished or next(second, None) is None
    assert steps == {0: [0, 1, 2], 1: [0, 1, 2]}


def test_a_reader_whose_run_another_trainer_took_is_fenced(run: RunClient, service: ServeProcess) -> None:
    """While it waits for a batch."""
    run.put(batch={"groups_per_batch": 1})
    with Client(service.url, run.run) as client:
        attached = client.attach()
        taken: list[int] = []
        options = ReaderOptions(poll_s=0.05, on_waiting=lambda _: taken.append(taken[0] if taken else run.attach()))
        with BatchReader(client, attached.epoch, attached.step, options) as reader, pytest.raises(Fenced):
            next(reader)


def test_a_batch_packed_for_another_number_of_ranks_is_refused(run: RunClient, service: ServeProcess) -> None:
    """Fewer readers than ranks would leave a part of every batch untrained. By default there is one reader."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    with Client(service.url, run.run) as client:
        attached = client.attach(dp_world_size=2)
        for options in (ReaderOptions(), ReaderOptions(dp_world_size=1), ReaderOptions(dp_rank=1, dp_world_size=3)):
            expected = rf"reader is {options.dp_world_size}; batch 0 is packed for 2\. Attach with"
            refused = pytest.raises(Conflict, match=expected)
            with BatchReader(client, attached.epoch, 0, options) as one, refused:
                next(one)
        with BatchReader(client, attached.epoch, 0, ReaderOptions(dp_world_size=2)) as two:
            assert next(two).meta.dp_world_size == 2


def test_a_body_may_be_any_bytes_like_object() -> None:
    """Those that direct mode builds are memory views."""
    reader = BatchReader(cast(Client, ScriptedClient()), EPOCH, 0)
    bodies: list[Body] = [body(0), memoryview(body(0))]
    assert [reader.read(one).meta.step for one in bodies] == [0, 0]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"poll_s": 0.0}, "poll_s is 0.0; it must be above 0"),
        ({"wait_ms": -1}, "wait_ms is -1; the minimum is 0"),
        ({"dp_rank": 1}, "dp_rank is 1; it must be below dp_world_size = 1"),
        ({"dp_rank": 2, "dp_world_size": 2}, "dp_rank is 2; it must be below dp_world_size = 2"),
        ({"dp_world_size": 0}, "dp_world_size is 0; the minimum is 1"),
        ({"service_timeout_s": float("nan")}, "service_timeout_s is nan; the minimum is 0"),
    ],
)
def test_an_option_outside_its_bound_is_refused(option: dict[str, Any], told: str) -> None:
    """A reader that never pauses would ask the service without end."""
    with pytest.raises(Invalid, match=told):
        ReaderOptions(**option)


@pytest.mark.parametrize("step", [0, 7])
def test_nothing_can_be_acked_before_a_batch_was_handed_out(step: int) -> None:
    """A trainer that resumes would ack the step before once more, without an error."""
    with pytest.raises(Invalid, match=f"ack before the batch of step {step}; get that batch first"):
        BatchReader(cast(Client, ScriptedClient()), EPOCH, step).ack()
