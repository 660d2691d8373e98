"""A service that pushes its metrics, because nobody scrapes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint

from tests.cli.test_main import replaybuf
from tests.conftest import RunClient, ServeProcess, Starter, group
from tests.metric_push.receiver import Receiver, points
from tests.ports import free_port
from tests.waiting import eventually

TIMEOUT_S = 60.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().up() as server:
        yield server


def stored(receiver: Receiver) -> float | None:
    """Return the number of stored groups that the Pushgateway has."""
    return receiver.came[-1].samples().get("replaybuf_groups_stored_total,run=r") if receiver.came else None


def newest(receiver: Receiver, name: str) -> Any:
    """Return the newest point of a metric at a collector; an empty one if there is none."""
    return points(receiver.came).get(name, NumberDataPoint())


def names(text: bytes) -> set[bytes]:
    """Return the metrics of a text, with labels."""
    return {line.rpartition(b" ")[0] for line in text.splitlines()}


def test_a_pushgateway_has_all_metrics_up_to_the_end_of_the_service(
    tmp_path: Path, receiver: Receiver, started: Starter
) -> None:
    """What a scrape would have had; the last push comes after the last call."""
    options = ("--push-metrics", f"http://{receiver.address}", "--push-metrics-every-s", "0.2")
    server = started(ServeProcess(tmp_path / "data", *options))
    run = RunClient(server.url, "r")
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    eventually(lambda: stored(receiver) == 1, TIMEOUT_S)
    assert receiver.came[-1].path.startswith("/metrics/job/replaybuf/instance/")
    assert receiver.came[-1].path.endswith(f"%3A{server.url.rpartition(':')[2]}")
    scraped = names(run.http.get("/metrics").content)
    eventually(lambda: scraped <= names(receiver.came[-1].body), TIMEOUT_S)
    run.append(group("b"))
    run.http.close()
    assert server.stop() == 0
    assert stored(receiver) == 2


def test_a_service_runs_while_its_collector_is_away(tmp_path: Path) -> None:
    """The metrics come when it is there. By environment, as containers are configured."""
    receiver = Receiver(free_port())
    server = ServeProcess(tmp_path / "data")
    server.environment = {
        "REPLAYBUF_SERVE_PUSH_METRICS": f"otlp+http://{receiver.address}",
        "REPLAYBUF_SERVE_PUSH_METRICS_EVERY_S": "0.2",
    }
    server.start()
    try:
        run = RunClient(server.url, "r")
        run.put(batch={"groups_per_batch": 1})
        assert run.append(group("a"))[0]["status"] == "stored"
        with receiver.up():
            eventually(lambda: newest(receiver, "replaybuf_groups_stored,run=r").as_double == 1, TIMEOUT_S)
        run.http.close()
        assert server.stop() == 0
    finally:
        server.end()
    assert "Traceback" not in (tmp_path / "data.log").read_text()


def test_a_wrong_url_ends_the_start_with_one_message(tmp_path: Path) -> None:
    done = replaybuf("serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--push-metrics", "gateway:9091")
    assert done.returncode == 1 and done.stderr.count("push_metrics is not a URL to push to") == 1
