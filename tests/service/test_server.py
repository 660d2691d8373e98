"""The server around the runs: health, metrics, description, tokens, console."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import re
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.errors import Invalid
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.turns import cancel_all
from tests.conftest import RunClient, ServeProcess, group
from tests.forked import run_forked

ROLES = ("producer", "trainer", "reader", "operator")


def metric(text: str, name: str, **labels: str) -> float:
    """Read one sample of a Prometheus text."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    raise AssertionError(f"{name}{labels} is missing")


def test_readiness_reports_the_durability_level(service: ServeProcess) -> None:
    """An embedded Valkey is strict."""
    answer = httpx.get(f"{service.url}/readyz").json()
    assert (answer["status"], answer["durability"], answer["waiting_for"]) == ("ready", "strict", None)


def test_metrics_count_what_happened_to_groups(run: RunClient) -> None:
    """Stored, dropped by reason, live, waiting by reason, versions."""
    run.put(batch={"groups_per_batch": 2})
    epoch = run.attach()
    run.append(group("a"), group("b", version=4))
    run.batch(0, epoch)
    run.batch(0, epoch)
    text = run.http.get("/metrics").text
    assert metric(text, "replaybuf_groups_stored_total", run=run.run) == 1
    assert metric(text, "replaybuf_groups_dropped_total", run=run.run, reason="version_above_published") == 1
    assert metric(text, "replaybuf_groups_live", run=run.run) == 1
    assert metric(text, "replaybuf_tokens_live", run=run.run) == 10
    assert metric(text, "replaybuf_published_version", run=run.run) == 0
    assert metric(text, "replaybuf_step", run=run.run) == 0
    assert metric(text, "replaybuf_waiting_seconds_total", run=run.run, reason="too_few_groups") > 0
    assert metric(text, "replaybuf_waiting_seconds_total", run=run.run, reason="paused") == 0


def test_the_console_loads_nothing_from_other_hosts(service: ServeProcess) -> None:
    """The policy of the page forbids it, and every file that the page names comes from this server."""
    page = httpx.get(service.url)
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://", page.text)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    named = re.findall(r"(?:href|src)=\"(/[^\"]+)\"", page.text)
    assert {"/console/app.js", "/console/style.css"} < set(named)
    assert all(httpx.get(service.url + path).status_code == 200 for path in named)


def test_a_file_of_the_console_is_loaded_again_only_after_a_change(service: ServeProcess) -> None:
    """The ETag is a digest of the content."""
    first = httpx.get(f"{service.url}/console/app.js")
    assert first.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(f"{service.url}/console/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["../pyproject.toml", "%2e%2e/errors.py", "vendor", "", "console.py"])
def test_the_console_gives_out_no_other_file(service: ServeProcess, name: str) -> None:
    """Files are looked up in a table, never on the disk."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    head = f"GET /console/{name} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(head.encode())
        assert raw.recv(100).split()[1] == b"404"


def test_unknown_paths_and_methods_are_problems_too(service: ServeProcess) -> None:
    """404 and 405 as problem documents."""
    assert httpx.get(f"{service.url}/nope").json()["status"] == 404
    wrong = httpx.post(f"{service.url}/v1/runs")
    assert (wrong.status_code, wrong.headers["content-type"]) == (405, "application/problem+json")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServeProcess, dict[str, str]]]:
    """A service with one token per role."""
    folder = tmp_path_factory.mktemp("guarded")
    tokens = {role: new_token(role, folder / "tokens") for role in ROLES}
    server = ServeProcess(folder / "data", "--tokens-file", str(folder / "tokens")).start()
    yield server, tokens
    server.end()


def new_token(role: str, path: Path) -> str:
    """Make a token with the command a user would type."""
    command = ["token", "new", "--role", role, "--name", f"a {role}", "--tokens-file", str(path)]
    made = run_forked("replaybuf", command)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.mark.parametrize("line", [b"{", b'{"role": "\xff"}'])
def test_a_tokens_file_with_a_broken_line_is_refused_with_its_number(tmp_path: Path, line: bytes) -> None:
    """Cut short, or not UTF-8."""
    path = tmp_path / "tokens"
    new_token("reader", path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(Invalid, match=r"tokens:2: "):
        Tokens.read(path)


ALLOWED = [
    ("PUT", "", {"operator"}),
    ("PATCH", "", {"operator"}),
    ("GET", "", {"producer", "trainer", "reader", "operator"}),
    ("POST", "/tickets", {"producer", "operator"}),
    ("DELETE", "/tickets/t0-0-1", {"producer", "operator"}),
    ("POST", "/groups", {"producer", "operator"}),
    ("GET", "/groups", {"producer", "reader", "operator"}),
    ("GET", "/groups/a", {"producer", "reader", "operator"}),
    ("PUT", "/groups/a/columns", {"producer", "operator"}),
    ("POST", "/evaluations", {"producer", "operator"}),
    ("GET", "/evaluations", {"producer", "trainer", "reader", "operator"}),
    ("GET", "/policy", {"producer", "trainer", "reader", "operator"}),
    ("POST", "/policy", {"trainer", "operator"}),
    ("POST", "/attach", {"trainer", "operator"}),
    ("GET", "/batches/0?epoch=1", {"trainer", "operator"}),
    ("POST", "/batches/0/ack", {"trainer", "operator"}),
    ("POST", "/checkpoints", {"trainer", "operator"}),
    ("GET", "/batches/0/record", {"trainer", "reader", "operator"}),
    ("GET", "/batches/0/explain", {"trainer", "reader", "operator"}),
    ("GET", "/ledger", {"trainer", "reader", "operator"}),
    ("GET", "/dead-letters", {"reader", "operator"}),
    ("DELETE", "/dead-letters", {"operator"}),
    ("GET", "/flow", {"trainer", "reader", "operator"}),
    ("GET", "/history", {"trainer", "reader", "operator"}),
]


def test_the_ledger_names_the_token_that_changed_a_run(guarded: tuple[ServeProcess, dict[str, str]]) -> None:
    """The name of the token, never the token; changes of the service have none."""
    server, tokens = guarded
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {tokens['operator']}"}) as http:
        http.put("/v1/runs/audited", json={"batch": {"groups_per_batch": 1}}).raise_for_status()
        http.patch("/v1/runs/audited", json={"state": "paused"}).raise_for_status()
        records = http.get("/v1/runs/audited/ledger").json()["records"]
    assert [(record["type"], record.get("by")) for record in records] == [("CONFIG", "a operator")] * 2
    assert tokens["operator"] not in str(records)


@pytest.mark.parametrize(("method", "path", "roles"), ALLOWED)
def test_each_call_takes_the_roles_of_the_contract(
    guarded: tuple[ServeProcess, dict[str, str]], method: str, path: str, roles: set[str]
) -> None:
    """401 without a token, 403 with another role, anything else with the right one."""
    server, tokens = guarded
    with httpx.Client(base_url=server.url) as http:
        assert http.request(method, f"/v1/runs/x{path}").status_code == 401
        for role, token in tokens.items():
            headers = {"Authorization": f"Bearer {token}"}
            status = http.request(method, f"/v1/runs/x{path}", headers=headers).status_code
            assert (status != 403) == (role in roles), (role, status)


def test_health_is_open_and_metrics_need_a_reader(guarded: tuple[ServeProcess, dict[str, str]]) -> None:
    """A load balancer needs no token."""
    server, tokens = guarded
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    assert httpx.get(f"{server.url}/readyz").status_code == 200
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    reader = {"Authorization": f"Bearer {tokens['reader']}"}
    assert httpx.get(f"{server.url}/metrics", headers=reader).status_code == 200


async def stubborn() -> None:
    """Run for ever, and miss the first cancellation, as an await that ends in the same moment does."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)
    await asyncio.sleep(3600)


def test_a_ctrl_c_reaches_the_service_before_its_valkey(tmp_path: Path) -> None:
    """A terminal sends it to the whole group; a Valkey that ended first would be logged as a lost Redis."""
    terminal, shell = os.openpty()
    command = [sys.executable, "-m", "replaybuf", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen(
        command,
        stdin=shell,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith(b"listening") for line in process.stdout)
            os.write(terminal, b"\x03")
            assert process.wait(20) == 0
        finally:
            process.kill()
            for descriptor in (terminal, shell):
                os.close(descriptor)
    log.seek(0)
    reported = log.read()
    log.close()
    assert "stopped" in reported and "ERROR" not in reported
    assert "SIGINT" not in (tmp_path / "data" / "valkey.log").read_text()
    assert not (tmp_path / "data" / "valkey.sock").exists(), "the Valkey has ended too"


def test_a_job_that_swallows_its_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is cancelled again, and named in the log."""
    monkeypatch.setattr("replaybuf.service.turns.CANCEL_AGAIN_S", 0.01)

    async def end() -> bool:
        async with asyncio.timeout(10):
            task = asyncio.create_task(stubborn(), name="follow")
            await asyncio.sleep(0)
            await cancel_all([task])
            return task.cancelled()

    assert asyncio.run(end())
    assert "job did not end when cancelled job=follow" in caplog.text


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_of_a_body_is_reused() -> None:
    """In a process of its own: 64 MB are taken twice, the second time without new pages."""
    pages = "resource.getrusage(resource.RUSAGE_SELF).ru_minflt"
    program = f"""if True:
        import resource
        from replaybuf.service.server import keep_freed_memory
        keep_freed_memory()
        bytearray(64 << 20)
        before = {pages}
        bytearray(64 << 20)
        print({pages} - before)
    """
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 1000
