"""A service with tokens and TLS: rates by token, who did what, and renewal of the certificate."""

from __future__ import annotations

import contextlib
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import trustme

from replaybuf.client.client import Client
from replaybuf.errors import ServiceUnavailable
from replaybuf.service.http.token_file import StoredToken, hash_token
from tests.cli.test_main import replaybuf
from tests.conftest import RunClient, ServeProcess
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
    guarded.add("slow", "reader", max_calls_per_s=0.5)
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


def test_a_service_with_tls_serves_our_client_and_renews_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is open goes on; a broken file leaves the old certificate; plain HTTP is refused."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    first = write_certificate(authority, tmp_path)
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    server = ServeProcess(tmp_path / "data", *files)
    server.address = r"listening on (https://\S+)"
    server.start()
    try:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
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
    finally:
        server.end()
