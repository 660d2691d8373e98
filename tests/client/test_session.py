"""The session of a trainer: its reports come in an order in which a kill between two of them loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from replaybuf.client import Client, ReaderOptions, TrainerSession
from replaybuf.client.retries import Stopped
from replaybuf.errors import Fenced, Invalid, ServiceUnavailable
from replaybuf.wire.batch import Batch
from tests.conftest import RunClient, ServeProcess, group

QUICK = ReaderOptions(poll_s=0.05, service_timeout_s=60.0)


@pytest.fixture
def client(run: RunClient, service: ServeProcess) -> Iterator[Client]:
    """A client of a run of one group per batch; groups of versions 0 to 3 are there."""
    run.put(
        batch={"groups_per_batch": 1},
        max_steps=4,
        strategy={"name": "replay", "options": {"max_staleness": 9, "max_uses": 1, "look_ahead": 1}},
    )
    run.append(*(group(f"g{n}") for n in range(4)))
    with Client(service.url, run.run) as client:
        yield client


def test_a_session_trains_publishes_and_records_checkpoints_to_the_end_of_the_run(client: Client) -> None:
    """The checkpoints free the groups, and the loop ends with the run."""
    with client.trainer(reader=QUICK) as session:
        for batch in session:
            assert batch.meta.step == session.steps_done
            session.step_done(f"file:///weights/{batch.meta.step + 1}", checkpoint=True)
        assert session.reader.finished
    status = client.get_run()
    assert (status.state, status.step, status.checkpoints, status.groups.retired) == ("finished", 4, [4], 4)
    policy = client.get_policy()
    assert (policy.version, policy.weights_uri) == (4, "file:///weights/4")


def test_metrics_of_a_step_are_in_the_history_by_name(client: Client, run: RunClient) -> None:
    """Values that are no numbers count as missing; a second ack of the step changes nothing."""
    with client.trainer(reader=QUICK) as session:
        next(session)
        session.step_done(metrics={"loss": 0.25, "kl": float("nan"), "entropy": None})
        client.ack(0, session.epoch, metrics={"loss": 9.0})
        next(session)
        session.step_done()
    history = run.get("history").json()
    assert list(history["metrics"]) == ["loss"] and history["metrics_missing"] == 2
    assert history["metrics"]["loss"][:2] == [0.25, None]  # the reader may have a third batch already


def test_a_version_is_due_after_the_steps_of_a_publication(run: RunClient, service: ServeProcess) -> None:
    """Weights after another step are refused before anything is acked."""
    run.put(batch={"groups_per_batch": 1}, steps_per_publish=2)
    run.append(group("a"), group("b"))
    with Client(service.url, run.run) as client, client.trainer(reader=QUICK) as session:
        next(session)
        with pytest.raises(Invalid, match="after 1 step, and no version is due; steps_per_publish is 2"):
            session.step_done("file:///w")
        assert client.get_run().step == 0
        session.step_done()
        assert client.get_policy().version == 0
        next(session)
        session.step_done("file:///w")
        assert (client.get_policy().version, client.get_run().step) == (1, 2)


def test_a_run_with_adapters_publishes_each_by_its_name(run: RunClient, service: ServeProcess) -> None:
    """No version is due for all of them."""
    run.put(batch={}, adapters={"math": {"groups_per_batch": 1}})
    run.append(group("a", adapter="math"))
    with Client(service.url, run.run) as client, client.trainer(reader=QUICK) as session:
        next(session)
        with pytest.raises(Invalid, match=r"adapters: math\. Leave it out, or publish an adapter by its name"):
            session.step_done("file:///w")
        session.step_done()
        session.publish("file:///w", adapter="math")
        session.confirm()
        assert client.get_policy(adapter="math").version == 1


@pytest.mark.parametrize("reports", [0, 1, 2, 3])
def test_a_trainer_killed_between_two_reports_of_a_step_goes_on_from_its_checkpoint(
    client: Client, reports: int
) -> None:
    """The checkpoint of step 1 is on disk in each case, so step 0 is trained once and the checkpoint is reported."""
    with client.trainer(reader=QUICK) as killed:
        next(killed)
        if reports > 0:
            killed.ack()
        if reports > 1:
            killed.publish("file:///weights/1")
        if reports > 2:
            killed.checkpoint()
    with client.trainer(1, reader=QUICK) as session:
        assert (session.steps_done, client.get_run().step, client.get_run().checkpoints) == (1, 1, [1])
        session.publish("file:///weights/1")
        assert client.get_policy().weights_uri == "file:///weights/1"
        assert next(session).meta.step == 1


def test_a_session_with_a_successor_is_fenced(client: Client) -> None:
    with client.trainer(reader=QUICK) as old, client.trainer(reader=QUICK) as new:
        next(new)
        for call in (old.confirm, old.publish, old.checkpoint):
            with pytest.raises(Fenced):
                call()
        new.confirm()


def test_another_rank_joins_the_session_that_attached(client: Client) -> None:
    """It reads its own part of each batch, and starts no trainer of its own."""
    options = [ReaderOptions(poll_s=0.05, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    first, second = (client.trainer(reader=option) for option in options)
    attached = first.attach()
    second.join(attached.epoch, attached.step)
    with first, second:
        assert (next(first).meta.batch_id, first.epoch) == (next(second).meta.batch_id, second.epoch)


def test_stop_ends_the_batches_and_the_repetition_of_reports(own_service: ServeProcess) -> None:
    """Without it a report is repeated until the service is back."""
    with Client(own_service.url, "main") as client:
        client.put_run({"batch": {"groups_per_batch": 1}})
        session = client.trainer(reader=QUICK)
        session.attach()
        own_service.kill()
        failures: list[BaseException] = []

        def report() -> None:
            try:
                session.publish("file:///w", 0)
            except (Stopped, ServiceUnavailable) as error:
                failures.append(error)

        reporting = threading.Thread(target=report)
        reporting.start()
        session.stop()
        reporting.join(30.0)
        assert [type(failure) for failure in failures] == [Stopped]
        assert list(session) == []


def test_a_session_has_no_epoch_before_it_attaches(client: Client) -> None:
    session = client.trainer()
    for call in (session.step_done, session.confirm, lambda: next(session), lambda: session.epoch):
        with pytest.raises(Invalid, match="no trainer before `attach`"):
            call()


def test_a_session_that_attaches_again_reads_from_its_new_step(client: Client) -> None:
    """The reader of the older epoch is closed."""
    with client.trainer(reader=QUICK) as session:
        next(session)
        session.ack()
        old = session.reader
        session.attach(0)
        assert session.epoch == session.attachment.epoch == old.epoch + 1
        assert next(session).meta.step == 0 and list(old) == []


def test_an_ack_of_several_steps_acks_each_of_them(client: Client) -> None:
    """The metrics are those of the last one, and a repetition changes nothing."""
    with TrainerSession[Batch](client) as session:
        for step in range(2):
            assert isinstance(session.fetch(step, wait_ms=5000), bytes)
        session.ack(metrics={"loss": 0.5}, steps=2)
        session.ack(steps=2)
        assert (client.get_run().step, session.steps_done) == (2, 2)
        assert client.get_history().metrics["loss"] == [None, 0.5]


def test_a_version_that_the_run_has_is_not_due(
    run: RunClient, service: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one is published once, after all steps of it."""
    run.put(batch={"groups_per_batch": 1}, steps_per_publish=2)
    run.append(group("a"), group("b"))
    with Client(service.url, run.run) as client:
        session = TrainerSession[Batch](client)
        session.attach()
        publish, announced = client.publish_policy, []

        def publish_and_record(version: int, *args: Any) -> None:
            publish(version, *args)
            announced.append((session.steps_done, version))

        monkeypatch.setattr(client, "publish_policy", publish_and_record)
        for step in range(2):
            assert isinstance(session.fetch(step, wait_ms=5000), bytes)
            session.ack(steps=step + 1)
            session.publish_due("file:///due")
            session.publish_due("file:///due")
        assert announced == [(2, 1)]
        assert client.get_policy().weights_uri == "file:///due"


def test_a_session_without_a_reader_fetches_and_says_so(client: Client) -> None:
    session = TrainerSession[Batch](client)
    with session:
        assert isinstance(session.fetch(0, wait_ms=5000), bytes)
        with pytest.raises(Invalid, match="made without a reader; give it open_reader"):
            next(session)


def test_a_checkpoint_in_the_background_is_recorded_at_the_next_save(client: Client) -> None:
    """The last one is complete when it is reported, and needs no other save."""
    recorded = []
    with client.trainer(reader=QUICK) as session:
        for batch in session:
            session.step_done()
            session.checkpoint(written=batch.meta.step == 3)
            recorded.append(client.get_run().checkpoints)
    assert recorded == [[], [1], [2], [4]]


def test_a_report_without_an_answer_is_repeated_when_the_session_attaches_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the trainer is past that checkpoint, so attaching reports none of its own."""
    session = client.trainer(reader=ReaderOptions(poll_s=0.05, service_timeout_s=0.0))
    with session:
        next(session)
        session.ack()
        with monkeypatch.context() as away:
            away.setattr(client, "checkpoint", _unavailable)
            with pytest.raises(ServiceUnavailable):
                session.checkpoint()
        assert client.get_run().checkpoints == []
        session.attach(checkpoint=False)
        assert client.get_run().checkpoints == [1]


def test_the_report_of_a_loaded_checkpoint_is_repeated_until_the_service_answers(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.trainer(reader=QUICK) as killed:
        next(killed)
        killed.ack()
    report, failures = client.checkpoint, [ServiceUnavailable("away"), ServiceUnavailable("away")]

    def report_later(*args: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        report(*args, **options)

    monkeypatch.setattr(client, "checkpoint", report_later)
    client.trainer(1, reader=QUICK).attach()
    assert (failures, client.get_run().checkpoints) == ([], [1])


def _unavailable(*_: Any, **__: Any) -> None:
    raise ServiceUnavailable("away")
