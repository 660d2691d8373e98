"""Log lines: one event per line, fields for machines, and the request that caused them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf.logs import JsonLines, RequestIds, TextLines, request_id
from tests.conftest import RunClient, ServeProcess
from tests.forked import run_forked


@pytest.fixture
def in_request() -> Iterator[None]:
    token = request_id.set("abc-1")
    yield
    request_id.reset(token)


def record(message: str, *values: Any, **fields: Any) -> logging.LogRecord:
    return logging.LogRecord("replaybuf.x", logging.INFO, "x.py", 1, message, values, fields.get("exc_info"))


@pytest.mark.usefixtures("in_request")
def test_a_json_line_has_the_named_values_as_fields() -> None:
    """A value without a name is in the message only; 100 %% is no place."""
    line = msgspec.json.decode(JsonLines().format(record("done %s at 100%% run=%s seconds=%.2f", "a\nb", "toy", 1.25)))
    line.pop("time")
    assert line == {
        "level": "info",
        "logger": "replaybuf.x",
        "message": "done a\nb at 100% run=toy seconds=1.25",
        "run": "toy",
        "seconds": 1.25,
        "request": "abc-1",
    }


def test_a_traceback_is_one_field_and_a_path_is_its_text() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        made = JsonLines().format(record("failed folder=%s", Path("a/b"), exc_info=sys.exc_info()))
    line = msgspec.json.decode(made)
    assert "\n" not in made and line["folder"] == "a/b" and line["traceback"].endswith("ValueError: x")


@pytest.mark.usefixtures("in_request")
def test_a_text_line_stays_one_line_and_names_its_request() -> None:
    made = TextLines("%(levelname)s %(message)s").format(record("said %s", "a\r\nINFO forged"))
    assert made == "INFO said a\\r\\nINFO forged request=abc-1"


def test_ids_of_requests_are_new_each_time() -> None:
    ids = RequestIds()
    assert len({ids.new() for _ in range(1000)}) == 1000


def test_a_problem_names_its_request_and_the_log_has_the_same_id(tmp_path: Path) -> None:
    """The id of the caller, if it is a plain word, else one of the service."""
    server = ServeProcess(tmp_path / "data", "--log-format", "json", "--log-level", "debug").start()
    try:
        run = RunClient(server.url, "absent")
        answer = run.http.get(run.path, headers={"x-request-id": "job-7"})
        made = run.http.get(run.path, headers={"x-request-id": "no word"})
        run.http.close()
        log = server.log()
    finally:
        server.end()
    assert answer.headers["x-request-id"] == "job-7"
    lines = [msgspec.json.decode(line) for line in log.splitlines() if line]
    requests = {line.get("request"): line for line in lines if "/v1/runs/absent" in line["message"]}
    assert requests.keys() == {"job-7", made.headers["x-request-id"]}
    assert requests["job-7"]["status"] == 404


def test_a_service_writes_json_on_both_streams_also_when_it_cannot_start(tmp_path: Path) -> None:
    """Standard output has the address; the port of the second service is taken."""
    server = ServeProcess(tmp_path / "data", "--log-format", "json")
    server.address = r'\{.*"message":"listening on (http://[^\s"]+)"\}\n'
    server.start()
    try:
        port = server.url.rpartition(":")[2]
        command = ["--log-format", "json", "serve", "--port", port, "--data-dir", str(tmp_path / "other")]
        done = run_forked("replaybuf", command)
    finally:
        server.end()
    assert done.returncode == 1
    failures = [msgspec.json.decode(line) for line in (done.stdout + done.stderr).splitlines()]
    assert failures[-1]["level"] == "error" and port in failures[-1]["message"]


def test_every_command_takes_the_form_also_from_the_environment() -> None:
    environment = {"REPLAYBUF_STATUS_LOG_FORMAT": "xml", "PATH": ""}
    done = run_forked("replaybuf", ["status", "--url", "http://127.0.0.1:1"], environment)
    assert done.returncode != 0 and '"text"' in done.stderr + done.stdout
