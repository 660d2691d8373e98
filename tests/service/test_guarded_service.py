"""A service with tokens and TLS: rates by token, who did what, and renewal of the certificate."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from unittest.mock import patch

import httpx
import msgspec
import pytest
import trustme

from replaybuf.client.client import Client
from replaybuf.errors import ServiceUnavailable
from replaybuf.service.host import WATCH_PERIOD_S, Service
from replaybuf.service.http.guard.auth import Tokens
from replaybuf.service.http.guard.token_file import StoredToken, hash_token, new_token, revoke_token
from replaybuf.service.http.routes import application
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire import contract
from replaybuf.wire.frame import MEDIA_TYPE, encode_frame
from tests import builders
from tests.cli.test_main import replaybuf
from tests.conftest import RunClient, ServeProcess, Starter, group
from tests.service.test_server import metric
from tests.waiting import eventually

TIMEOUT_S = 30.0
CONFIG = {"batch": {"groups_per_batch": 1}}


class Guarded:
    """A service whose tokens are their names."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tokens"
        self.add("root", "operator")
        self.server = ServeProcess(folder / "data", "--tokens-file", str(self.file)).start()
        self.clients = contextlib.ExitStack()

    def add(self, name: str, role: str, **limits: object) -> None:
        """Add a token that is its name."""
        line = msgspec.json.encode(StoredToken(name, role, hash_token(name), **limits))  # type: ignore[arg-type]
        with self.file.open("ab") as file:
            file.write(line + b"\n")

    def reload(self) -> None:
        """Let the service read the file."""
        done = self.server.log().count("tokens reloaded")
        self.server.signal(signal.SIGHUP)
        eventually(lambda: self.server.log().count("tokens reloaded") > done, TIMEOUT_S)

    def client(self, run: str, name: str) -> RunClient:
        """A client with a token."""
        client = RunClient(self.server.url, run)
        client.http.headers["authorization"] = f"Bearer {name}"
        self.clients.callback(client.http.close)
        return client


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    yield made
    made.server.end()


@pytest.fixture(autouse=True)
def _close_clients(guarded: Guarded) -> Iterator[None]:
    yield
    guarded.clients.close()


def test_a_token_above_its_rate_is_answered_429_and_told_when(guarded: Guarded) -> None:
    guarded.add("slow", "reader", max_calls_per_s=0.01)
    guarded.reload()
    client = guarded.client("x", "slow")
    answers = [client.http.get("/v1/runs") for _ in range(3)]
    assert answers[0].status_code == 200
    assert answers[-1].status_code == 429 and int(answers[-1].headers["retry-after"]) >= 1
    assert answers[-1].json()["type"].endswith(":rate-limited") and "'slow'" in answers[-1].json()["detail"]


def test_a_body_without_a_declared_size_is_charged_too(guarded: Guarded) -> None:
    guarded.client("bytes", "root").put(**CONFIG)
    guarded.add("sender", "producer", max_bytes_per_s=1000)
    guarded.reload()
    client = guarded.client("bytes", "sender")
    parts = iter([b'{"producer": "', b"p" * 60, b'", "count": 1, "adapter": ""', b" " * 9000, b"}"])
    headers = {"content-type": "application/json"}
    assert client.http.post(f"{client.path}/tickets", content=parts, headers=headers).status_code == 200
    assert client.post("tickets", producer="p", count=1).status_code == 429


def test_what_operators_change_and_who_is_refused_is_on_record(guarded: Guarded) -> None:
    """In the ledger with the name of the holder, and in the log with the address; no token is in the log."""
    run = guarded.client("audited", "root")
    assert run.put(**CONFIG).status_code == 201
    assert run.http.patch(run.path, json={"limits": {"max_tokens_live": 1000}}).status_code == 200
    assert guarded.client("audited", "no-such-secret").get("").status_code == 401
    records = run.get("ledger").json()["records"]
    assert [record.get("by") for record in records if record["type"] == "CONFIG"] == ["root", "root"]
    log = guarded.server.log()
    assert "replaybuf.audit PATCH /v1/runs/audited status=200 by=root address=127.0.0.1" in log
    assert "run created run=audited strategy=one-step-off-policy by=root" in log
    assert 'run changed run=audited by=root change={"limits":{"max_tokens_live":1000}' in log
    assert "refused GET /v1/runs/audited" in log and "no-such-secret" not in log


def test_a_token_for_some_runs_lists_these_runs_alone(guarded: Guarded) -> None:
    """In the list, in the overview and in the terminal; what serves all runs in one answer stays refused."""
    for name in ("ours", "ours-too", "theirs"):
        guarded.client(name, "root").put(**CONFIG)
    guarded.add("guest", "reader", runs=("ours", "ours-too", "later"))
    guarded.reload()
    guest, root = guarded.client("ours", "guest"), guarded.client("ours", "root")
    for path in ("/v1/runs", "/v1/overview"):
        answer = guest.http.get(path)
        assert answer.status_code == 200, answer.text
        assert [row["run"] for row in answer.json()["runs"]] == ["ours", "ours-too"]
        assert "theirs" in [row["run"] for row in root.http.get(path).json()["runs"]]
    listed = replaybuf("runs", "list", "--url", guarded.server.url, "--token", "guest")
    assert "ours-too" in listed.stdout and "theirs" not in listed.stdout
    missing = guarded.client("later", "guest").get("").json()
    assert missing["bound"] == ["ours", "ours-too"] and "theirs" not in missing["detail"]
    assert guest.http.get("/metrics").status_code == 403
    assert guarded.client("theirs", "guest").get("").status_code == 403


def test_readiness_is_open_and_names_only_runs_that_the_caller_may_see(guarded: Guarded) -> None:
    """A probe without a token learns whether the service is ready, and no name of a run."""
    for name in ("ours", "theirs"):
        guarded.client(name, "root").put(**CONFIG)
    guarded.add("prober", "reader", runs=("ours",))
    guarded.add("of-old", "reader", expires_s=1.0)
    guarded.reload()
    named = {}
    for holder in ("prober", "root", "of-old", "no-such-secret"):
        answer = guarded.client("ours", holder).http.get("/readyz")
        assert answer.status_code == 200 and answer.json()["status"] == "ready"
        assert answer.json()["runs"] == list(answer.json()["leaders"])
        named[holder] = answer.json()["runs"]
    assert named["prober"] == ["ours"] and {"ours", "theirs"} <= set(named["root"])
    assert named["of-old"] == named["no-such-secret"] == []
    assert b"theirs" not in httpx.get(f"{guarded.server.url}/readyz").content


def test_a_role_that_may_not_list_runs_may_not_list_its_own(guarded: Guarded) -> None:
    guarded.add("writer", "producer", runs=("ours",))
    guarded.reload()
    client = guarded.client("ours", "writer")
    assert client.http.get("/v1/runs").status_code == 403
    assert client.http.get("/v1/overview").status_code == 403


# ---------------------------------------------------------------------- calls from before a revocation


def begin(client: RunClient, method: str, call: str, *parts: bytes, kind: str = "application/json") -> HTTPConnection:
    """Send a request, or the first parts of a longer body, and let the service begin with it; nobody reads the answer.

    What arrives later on another connection is answered later, so two calls are enough to know that it has begun.
    """
    connection = HTTPConnection(client.http.base_url.host, client.http.base_url.port, timeout=TIMEOUT_S)
    connection.putrequest(method, f"{client.path}/{call}")
    connection.putheader("authorization", client.http.headers["authorization"])
    connection.putheader("content-type", kind)
    connection.putheader("transfer-encoding", "chunked")
    connection.endheaders()
    for part in parts:
        connection.send(chunk(part))
    for _ in range(2):
        client.http.get("/v1/runs")
    return connection


def chunk(part: bytes) -> bytes:
    """One chunk of a body; an empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(part), part)


def answer(connection: HTTPConnection) -> tuple[int, str]:
    """The status and the text of an answer."""
    with contextlib.closing(connection):
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")


WAITS = {
    "batch": ("trainer", "GET", "batches/0?epoch=1&wait_ms=20000"),
    "policy": ("trainer", "GET", "policy?after=0&wait_ms=20000"),
    "cursor": ("reader", "GET", "cursors/c?kind=stored&wait_ms=20000"),
    "tickets": ("producer", "POST", "tickets"),
}


def wait(guarded: Guarded, poll: str, run: str, **limits: object) -> HTTPConnection:
    """Let the holder of a new token, which has the name of the run, wait for an answer of the poll."""
    role, method, call = WAITS[poll]
    root = guarded.client(run, "root")
    root.put(**CONFIG)
    assert root.attach() == 1
    root.post("tickets", producer="p", count=9)
    guarded.add(run, role, **limits)
    guarded.reload()
    body = b'{"producer": "waiting", "count": 1, "wait_ms": 20000}' if poll == "tickets" else b""
    return begin(guarded.client(run, run), method, call, *([body, b""] if body else [b""]))


@pytest.mark.parametrize("poll", WAITS)
def test_a_call_that_waits_when_its_token_is_revoked_returns_nothing_stored_later(guarded: Guarded, poll: str) -> None:
    run = f"revoked-{poll}"
    waiting = wait(guarded, poll, run)
    revoke_token(run, guarded.file)
    guarded.reload()
    root = guarded.client(run, "root")
    assert root.append(group("secret"))[0]["status"] == "stored"
    assert root.batch(0, 1, wait_ms=20000).status_code == 200
    assert root.ack(0, 1).status_code == root.publish(1, 1).status_code == 200
    status, text = answer(waiting)
    assert status == 401 and "was not in the tokens file" in text
    assert "secret" not in text and "version" not in text


@pytest.mark.parametrize("poll", WAITS)
def test_a_call_that_waits_ends_when_its_token_is_limited_to_other_runs(guarded: Guarded, poll: str) -> None:
    """Nothing happens in the run meanwhile. A reload that does not change the token ends nothing."""
    run = f"limited-{poll}"
    waiting = wait(guarded, poll, run)
    guarded.reload()
    guarded.add(run, WAITS[poll][0], runs=("theirs",))
    guarded.reload()
    status, text = answer(waiting)
    assert status == 403 and "limited to the runs theirs" in text


def test_a_call_that_waits_ends_when_its_token_expires(guarded: Guarded) -> None:
    status, text = answer(wait(guarded, "policy", "expiring", expires_s=time.time() + 1.0))
    assert status == 401 and "has expired" in text
    assert "refused GET /v1/runs/expiring/policy" in guarded.server.log()


def test_an_upload_stores_nothing_that_arrives_after_its_token_is_revoked(guarded: Guarded) -> None:
    root = guarded.client("uploads", "root")
    root.put(**CONFIG)
    guarded.add("uploader", "producer")
    guarded.reload()
    early, late = (encode_frame(builders.group(group_id=name)) for name in ("early", "late"))
    upload = begin(guarded.client("uploads", "uploader"), "POST", "groups", early, kind=MEDIA_TYPE)
    revoke_token("uploader", guarded.file)
    guarded.reload()
    upload.send(chunk(late) + chunk(b""))
    assert answer(upload)[0] == 401
    assert root.get("groups/late").status_code == 404


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_answer_that_is_ready_as_its_token_is_revoked_is_not_sent(
    server: EmbeddedServer, tmp_path: Path, method: str
) -> None:
    """State or tickets: the token may be revoked in the turn of the event loop that ends a wait, or just after it."""
    path = tmp_path / "tokens"
    header = {"authorization": f"Bearer {new_token('operator', 'root', path)}"}

    async def main() -> None:
        store, tokens = await Store.open(server.url), Tokens.read(path)
        service = Service(store, url="http://127.0.0.1", embedded=True)
        await service.start()

        issued = contract.Tickets(tickets=[], published_version=0)

        async def revoke(*_: object) -> object:
            revoke_token("root", path)
            tokens.reload()
            return service.runs[method.lower()] if method == "GET" else issued

        transport = httpx.ASGITransport(application(service, tokens))
        http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=header)
        async with http, contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(store.close)
            run = f"/v1/runs/{method.lower()}"
            assert (await http.put(run, json=CONFIG)).status_code == 201
            owner, name = (service, "run") if method == "GET" else (service.runs["post"].tickets, "issue")
            with patch.object(owner, name, revoke):
                asked = http.get(run) if method == "GET" else http.post(f"{run}/tickets", json={"producer": "p"})
                assert (await asked).status_code == 401

    asyncio.run(main())


# ---------------------------------------------------------------------- TLS


def write_certificate(authority: trustme.CA, folder: Path) -> str:
    """Write a certificate of 127.0.0.1; return its serial number as a connection shows it."""
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    return ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text()).hex()


def shown_certificate(url: str) -> str:
    """The certificate that a new connection is shown."""
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((parsed.host, parsed.port), timeout=TIMEOUT_S)).hex()


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """An authority whose certificates this process trusts."""
    made = trustme.CA()
    made.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return made


@contextlib.contextmanager
def tls_server(folder: Path, *options: str) -> Iterator[ServeProcess]:
    """Serve with the certificate in `folder`."""
    files = ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))
    server = ServeProcess(folder / "data", *files, *options)
    server.address = r"listening on (https://\S+)"
    try:
        yield server.start()
    finally:
        server.end()


def test_clients_that_never_finish_their_handshake_take_no_more_than_their_places(
    tmp_path: Path, authority: trustme.CA
) -> None:
    """80 of them at a service of 40 connections; a client that does finish gets in."""
    write_certificate(authority, tmp_path)
    with tls_server(tmp_path, "--max-connections", "40") as server, contextlib.ExitStack() as held:
        url = httpx.URL(server.url)
        for _ in range(80):
            raw = held.enter_context(socket.create_connection((url.host, url.port or 0), timeout=TIMEOUT_S))
            raw.sendall(b"\x16\x03\x01\x02\x00")  # the head of a record
        text = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
        assert metric(text, "replaybuf_connections") <= 40
        assert metric(text, "replaybuf_requests_refused_total", reason="too_many_connections") >= 41


def test_a_handshake_takes_no_longer_than_a_head_may(tmp_path: Path, authority: trustme.CA) -> None:
    write_certificate(authority, tmp_path)
    with tls_server(tmp_path, "--head-timeout-s", "1") as server:
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port or 0), timeout=TIMEOUT_S) as raw:
            assert raw.recv(1) == b""
        text = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
        assert metric(text, "replaybuf_requests_refused_total", reason="head_timeout") == 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc and prlimit")
def test_a_service_without_a_free_descriptor_goes_on_when_there_is_one(tmp_path: Path, started: Starter) -> None:
    """Meanwhile what it saves beside Redis fails again and again, also after the line that the log has once."""
    server = started(ServeProcess(tmp_path / "data"))
    with Client(server.url, "r", timeout_s=TIMEOUT_S) as client:
        client.put_run(CONFIG)
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        client.append([builders.group()])
        eventually(lambda: "cannot be saved" in server.log(), TIMEOUT_S)
        over_s = time.monotonic() + 3 * WATCH_PERIOD_S
        eventually(lambda: client.get_run().groups.stored == 1 and time.monotonic() > over_s, TIMEOUT_S)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    server.kill()
    with Client(server.start().url, "r", timeout_s=TIMEOUT_S) as client:
        assert client.get_run().groups.stored == 1


def test_a_service_with_tls_serves_our_client_and_renews_its_certificate(tmp_path: Path, authority: trustme.CA) -> None:
    """A connection that is open goes on; a broken file leaves the old certificate; plain HTTP is refused."""
    first = write_certificate(authority, tmp_path)
    with tls_server(tmp_path) as server:
        with Client(server.url, "r", timeout_s=TIMEOUT_S) as client:
            client.put_run(CONFIG)
            assert shown_certificate(server.url) == first
            second = write_certificate(authority, tmp_path)
            server.signal(signal.SIGHUP)
            eventually(lambda: shown_certificate(server.url) == second, TIMEOUT_S)
            (tmp_path / "cert.pem").write_text("no certificate")
            server.signal(signal.SIGHUP)
            eventually(lambda: "certificate is not reloaded" in server.log(), TIMEOUT_S)
            assert shown_certificate(server.url) == second
            assert client.get_run().run == "r"
        with pytest.raises(ServiceUnavailable), Client(server.url.replace("https", "http"), "r") as plain:
            plain.get_run()
