"""Pushes to a server that answers, refuses, hangs, and goes away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from replaybuf.errors import Invalid
from replaybuf.metric_push import Identity, Pusher, otlp, pusher
from tests.metric_push.receiver import Receiver, points
from tests.waiting import eventually

TIMEOUT_S = 30.0
ME = Identity("replaybuf", "host/a:8900")
OFTEN_S = 0.02
NEVER_S = 3600.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().up() as server:
        yield server


def text() -> bytes:
    """A counter, a gauge and a histogram, with labels."""
    registry = CollectorRegistry()
    Counter("groups", "Groups", ("run",), registry=registry).labels("r").inc(3)
    Gauge("step", "Newest\nstep", registry=registry).set(7.5)
    times = Histogram("seconds", "Times", ("run",), buckets=(0.5, 2), registry=registry).labels("r")
    for value in (0.1, 1.0, 1.5, 9.0):
        times.observe(value)
    return generate_latest(registry)


def pushed_once(url: str, read: bytes) -> None:
    """Push at the end only."""
    Pusher(url, ME, lambda: read, NEVER_S).close()


@pytest.mark.parametrize("prefix", ["", "/pushes"])
def test_a_pushgateway_gets_the_text_as_the_group_of_job_and_instance(receiver: Receiver, prefix: str) -> None:
    """By PUT, which replaces the group; with the user of the URL."""
    read = text()
    pushed_once(f"http://me:p%40ss@{receiver.address}{prefix}/", read)
    (push,) = receiver.came
    assert (push.method, push.path) == ("PUT", f"{prefix}/metrics/job/replaybuf/instance/host%2Fa%3A8900")
    assert push.authorization == "Basic bWU6cEBzcw=="
    assert (push.body, push.samples()["groups_total,run=r"]) == (read, 3.0)


def test_a_collector_gets_sums_gauges_and_histograms(receiver: Receiver) -> None:
    """With the name of the service and the instance; buckets are counted each."""
    pushed_once(f"otlp+http://{receiver.address}", text())
    (push,) = receiver.came
    assert (push.method, push.path) == ("POST", "/v1/metrics")
    (resource,) = push.request().resource_metrics
    named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (named["service.name"], named["service.instance.id"]) == ME
    kinds = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert kinds["groups"].sum.is_monotonic and kinds["groups"].sum.aggregation_temporality == 2
    assert kinds["step"].description == "Newest\nstep"
    lines = points([push])
    assert (lines["groups,run=r"].as_double, lines["step"].as_double) == (3.0, 7.5)
    times = lines["seconds,run=r"]
    assert (times.count, times.sum) == (4, pytest.approx(11.6))
    assert (list(times.explicit_bounds), list(times.bucket_counts)) == ([0.5, 2.0], [1, 2, 1])
    assert not times.HasField("min")


def test_many_points_go_to_a_collector_in_several_requests(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point once, also of a metric with more points than a request."""
    monkeypatch.setattr(otlp, "MOST_POINTS", 4)
    rows = b"".join(b'a{n="%d"} %d\n' % (n, n) for n in range(9))
    pushed_once(f"otlp+http://{receiver.address}/", b"# TYPE a gauge\n" + rows + b"# TYPE b gauge\nb 1\n")
    sizes = [len(points([push])) for push in receiver.came]
    assert sizes == [4, 4, 2] and len(points(receiver.came)) == 10


@pytest.mark.parametrize("scheme", ["http", "otlp+http"])
def test_a_server_that_goes_and_comes_is_logged_once_each(
    scheme: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused pushes count as failed; the newest metrics come with the next one."""
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.2)  # the exporter of OpenTelemetry retries for so long
    caplog.set_level(logging.INFO, logger=pusher.__name__)
    receiver, reads = Receiver(), threading.Semaphore(0)

    def read() -> bytes:
        reads.release()
        return text()

    def messages() -> list[str]:
        return [record.message for record in caplog.records if record.name == pusher.__name__][1:]

    with receiver.up():
        pushing = Pusher(f"{scheme}://{receiver.address}", ME, read, OFTEN_S)
        eventually(lambda: len(receiver.came) >= 2, TIMEOUT_S)
        receiver.status = 400
        eventually(messages, TIMEOUT_S)
    for _ in range(3):
        assert reads.acquire(timeout=TIMEOUT_S)
    receiver.status = 200
    with receiver.up():
        eventually(lambda: len(messages()) == 2, TIMEOUT_S)
        pushing.close()
    failed, again = messages()
    assert failed.startswith(f"cannot push metrics to {scheme}://{receiver.address}") and "again" in again


def test_a_read_that_fails_is_a_failed_push(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """The next one may succeed."""
    tries = count()

    def read() -> bytes:
        if next(tries) == 0:
            raise OSError("cannot read")
        return b"a 1\n"

    pushing = Pusher(f"http://{receiver.address}", ME, read, OFTEN_S)
    eventually(lambda: receiver.came, TIMEOUT_S)
    pushing.close()
    assert "cannot read" in caplog.text and receiver.came[0].body == b"a 1\n"


def test_the_end_waits_for_the_last_push_within_a_bound(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs does not keep the process."""
    monkeypatch.setattr(pusher, "CLOSE_S", 0.2)
    receiver.gate.clear()
    pushing = Pusher(f"http://{receiver.address}", ME, text, NEVER_S)
    began_s = time.monotonic()
    pushing.close()
    assert time.monotonic() - began_s < TIMEOUT_S
    assert eventually(lambda: receiver.came, TIMEOUT_S)


@pytest.mark.parametrize(
    "url",
    ["", "gateway:9091", "ftp://gateway", "http://", "http://gateway:x", "http://[::1", "http://g/?a=1", "otlp://g"],
)
def test_a_url_of_another_form_is_rejected_without_its_password(url: str) -> None:
    with pytest.raises(Invalid, match="push_metrics is not a URL to push to; use http") as caught:
        Pusher(url.replace("http://g", "http://me:secret@g"), ME, text, NEVER_S)
    assert "secret" not in caught.value.detail
