"""Spans of real processes at a real OTLP receiver: a group can be followed from its ticket to the ack of its batch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaybuf.errors import MissingExtra
from replaybuf.tracing import spans
from tests.cli.test_generate import generator, put
from tests.conftest import RunClient, ServeProcess, group
from tests.generator.doubles import EngineDouble
from tests.tracing.collector import Collector, collecting

TRAIN = """
import sys
from replaybuf.client import Client
from replaybuf.tracing import spans
from replaybuf.wire.contract import WaitingAnswer
spans.enable("replaybuf-train", sys.argv[2])
with Client(sys.argv[1], sys.argv[2]) as client:
    epoch = client.attach(1, 0).epoch
    for step in range(int(sys.argv[3])):
        while isinstance(client.fetch_batch(step, epoch, 0, 20_000), WaitingAnswer):
            pass
        client.ack(step, epoch)
        client.publish_policy(step + 1, epoch)
spans.disable()
"""
"""A trainer that does nothing with its batches."""
TIMEOUT_S = 200.0


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as came:
        yield came


@contextlib.contextmanager
def serving(folder: Path, environment: dict[str, str]) -> Iterator[ServeProcess]:
    """Run a service with its own environment."""
    server = ServeProcess(folder / "data")
    server.environment = environment
    try:
        yield server.start()
    finally:
        server.end()


@contextlib.contextmanager
def client(url: str) -> Iterator[RunClient]:
    """Return a client of the run `traced`."""
    made = RunClient(url, "traced")
    with made.http:
        yield made


def train(url: str, run: str, steps: int) -> None:
    """Train as a process, whose spans go where those of this process would go."""
    subprocess.run([sys.executable, "-c", TRAIN, url, run, str(steps)], check=True, timeout=TIMEOUT_S)


def train_twice(folder: Path) -> None:
    """Generate six groups and train them in two steps, with three processes, and wait until all have ended."""
    with serving(folder, {}) as server, client(server.url) as run:
        put(run, tickets={"prompts": 6})

        async def main() -> None:
            async with (
                EngineDouble().up() as engine,
                generator(folder, server.url, run.run, engine.url) as process,
            ):
                await asyncio.to_thread(train, server.url, run.run, 2)
                _, error = await process.communicate()
                assert process.returncode == 0, error.decode()

        asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
        assert server.stop() == 0


@pytest.fixture(scope="module")
def traced_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """Two steps of six prompts by three processes that record spans and have ended."""
    folder = tmp_path_factory.mktemp("traced")
    with collecting() as collector:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in collector.environment.items():
                patch.setenv(name, value)
            train_twice(folder)
        yield collector


def test_a_group_can_be_followed_by_links_from_its_ticket_to_the_publication(traced_run: Collector) -> None:
    """Each arrow is a link or a parent: tickets <- generate -> store -> call -> append, assemble -> store."""
    came = traced_run
    generated, stored = came.only("group generate", group_id="p0"), came.only("group store", group_id="p0")
    assert generated.trace == stored.trace
    assert generated.attributes["replaybuf.outcome"] == "stored" and generated.attributes["replaybuf.attempt"] == 1
    within = [span.name for span in came.spans if span.parent == generated.span]
    assert "score" in within and any(name.startswith("POST /") for name in within), within
    (tickets,) = generated.links
    assert came.at(*tickets).name == "take tickets"
    answered = came.at(*stored.links[0])
    requested = came.at(answered.trace, answered.parent)
    appended = came.at(requested.trace, requested.parent)
    assert [span.name for span in (answered, requested, appended)] == ["POST /groups", "POST /groups", "append"]
    assert [span.process for span in (answered, requested)] == ["replaybuf-serve", "replaybuf-generate"]
    assert (generated.trace, generated.span) in appended.links

    (assembled,) = [span for span in came.named("batch assemble") if (stored.trace, stored.span) in span.links]
    step = assembled.attributes["replaybuf.step"]
    for name, call in (
        ("deliver", "GET /batches/{step}"),
        ("ack", "POST /batches/{step}/ack"),
        ("publish", "POST /policy"),
    ):
        happened = came.only(f"batch {name}", step=step)
        assert (happened.trace, happened.parent) == (assembled.trace, assembled.span)
        answered = came.at(*happened.links[0])
        requested = came.at(answered.trace, answered.parent)
        assert (answered.name, requested.name, requested.process) == (call, call, "replaybuf-train")


def test_spans_name_their_service_and_run(traced_run: Collector) -> None:
    processes = {span.process: span.resource.get("replaybuf.run") for span in traced_run.spans}
    assert processes == {"replaybuf-serve": None, "replaybuf-generate": "traced", "replaybuf-train": "traced"}
    assert {span.attributes["replaybuf.run"] for span in traced_run.named("group store")} == {"traced"}
    calls = {span.name for span in traced_run.spans if span.process == "replaybuf-serve"}
    assert calls - spans.CALLS == {
        "group store",
        *("batch assemble", "batch deliver", "batch ack", "batch publish"),
    }, "no span per heartbeat, policy poll or look at the status"


def test_without_the_option_nothing_is_recorded_or_imported(tmp_path: Path, collector: Collector) -> None:
    """A cluster may set the variables of OpenTelemetry for all its processes."""
    environment = {name: value for name, value in collector.environment.items() if name.startswith("OTEL")}
    with serving(tmp_path, environment) as server, client(server.url) as run:
        run.put(batch={"groups_per_batch": 1})
        assert run.append(group("a"))[0]["status"] == "stored"
        run.train(run.attach(), range(1))
        assert server.stop() == 0
    assert not collector.spans
    code = "import sys, replaybuf.cli.main, replaybuf.service.server, replaybuf.generator.process as _\n"
    code += "sys.exit(any(name.startswith('opentelemetry.exporter') for name in sys.modules))"  # redis imports the SDK
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S).returncode == 0


def traced(folder: Path, environment: dict[str, str], groups: int) -> None:
    """Store groups, train them as one batch, and stop the service."""
    folder.mkdir(exist_ok=True)
    with serving(folder, environment) as server, client(server.url) as run:
        assert run.put(batch={"groups_per_batch": groups, "tokens_per_batch": 65536}).status_code == 201
        assert {result["status"] for result in run.append(*(group(f"g{n}") for n in range(groups)))} == {"stored"}
        run.train(run.attach(), range(1))
        assert server.stop() == 0


def test_a_batch_links_to_each_of_its_groups(tmp_path: Path, collector: Collector) -> None:
    """A span has at most 128 links, so the other groups are linked by child spans."""
    traced(tmp_path, collector.environment, 300)
    assembled, stored = collector.only("batch assemble"), collector.named("group store")
    parts = collector.named("batch groups")
    assert [len(part.links) for part in (assembled, *parts)] == [128, 128, 44]
    assert {part.parent for part in parts} == {assembled.span}
    links = {link for part in (assembled, *parts) for link in part.links}
    assert links == {(span.trace, span.span) for span in stored} and len(links) == 300
    assert len({span.trace for span in stored}) == 300


def test_a_ratio_samples_the_same_groups_everywhere_and_every_batch(tmp_path: Path, collector: Collector) -> None:
    ratio = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    traced(tmp_path / "one", collector.environment | ratio, 64)
    first = {span.attributes["replaybuf.group_id"] for span in collector.named("group store")}
    assert 8 < len(first) < 56
    (assembled,) = collector.named("batch assemble")
    assert len(assembled.links) == 64
    collector.spans.clear()
    traced(tmp_path / "two", collector.environment | ratio, 64)
    assert {span.attributes["replaybuf.group_id"] for span in collector.named("group store")} == first


def test_a_failed_call_is_an_error_without_its_text(tmp_path: Path, collector: Collector) -> None:
    with serving(tmp_path, collector.environment) as server, client(server.url) as run:
        run.put(batch={"groups_per_batch": 1})
        epoch = run.attach()
        run.attach()
        assert run.ack(0, epoch).status_code == 409
        assert run.http.get("/v1/runs/" + "x" * 3000 + "/batches/0").status_code in (404, 422)
        assert server.stop() == 0
    failed = collector.only("POST /batches/{step}/ack")
    assert failed.error == "Fenced"
    assert all(len(str(value)) <= 1024 for span in collector.spans for value in span.attributes.values())


@pytest.mark.parametrize("answers", [True, False])
def test_a_collector_that_is_away_or_hangs_holds_nothing_up(tmp_path: Path, answers: bool) -> None:
    """No connection, or a connection without an answer: calls go on and the service stops."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if answers:
            silent.close()
        traced(tmp_path, {"REPLAYBUF_TRACES": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": address}, 4)


def test_the_option_without_the_extra_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "replaybuf.tracing.recorder", None)
    with pytest.raises(MissingExtra, match=r"--traces needs .* pip install 'replaybuf\[otel\]'"):
        spans.enable("x")
    assert not spans.enabled()
