"""Requests that a web page of another site makes a browser send, and names that are not of this service."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.errors import Invalid
from replaybuf.service.http.guard.origins import HostNames
from replaybuf.service.options import ServeOptions
from tests.conftest import RunClient, ServeProcess

MACHINE = socket.gethostname()


@pytest.mark.parametrize(
    ("options", "accepted", "refused"),
    [
        (
            {},
            ["127.0.0.1:8900", "localhost", "LOCALHOST:1", "localhost.:8900", "[::1]:8900", "127.0.0.2"],
            [
                "evil.example",
                "evil.example:8900",
                "127.0.0.1.evil.example",
                "10.0.0.5",
                "0.0.0.0:8900",
                "",
                "a b",
                "[::1",
            ],
        ),
        ({"host": "localhost"}, ["localhost:8900", "127.0.0.1"], ["evil.example"]),
        ({"host": "::1"}, ["[::1]:8900", "127.0.0.1", "localhost"], ["evil.example", "[fe80::1]"]),
        ({"host": "10.0.0.5"}, ["10.0.0.5:8900", f"{MACHINE}:8900"], ["localhost", "10.0.0.6", "127.0.0.1"]),
        ({"host": "0.0.0.0"}, ["10.0.0.5", "[fe80::1]:8900", "localhost", MACHINE], ["serve:8900", "evil.example"]),
        (
            {"allowed_hosts": ("serve", "rb.example.com:443"), "advertise_url": "http://a:8900,unix:/s,https://b"},
            ["serve:8900", "Serve", "rb.example.com:443", "a:8900", "b", "b:1", "127.0.0.1"],
            ["rb.example.com:80", "rb.example.com", "evil.example"],
        ),
    ],
)
def test_a_service_has_the_names_that_it_listens_on_and_those_it_is_given(
    options: dict[str, Any], accepted: list[str], refused: list[str]
) -> None:
    """Loopback, one address, every address, more names."""
    names = HostNames(ServeOptions(**options))
    assert [host for host in accepted if not names.accept(host)] == []
    assert [host for host in refused if names.accept(host)] == []


@pytest.mark.parametrize("name", ["", "http://serve", "a,b", "serve:", "a/b"])
def test_an_allowed_host_that_is_a_url_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="HOST or HOST:PORT"):
        HostNames(ServeOptions(allowed_hosts=(name,)))


def test_a_page_has_the_origin_of_its_own_server_or_of_an_allowed_host() -> None:
    """A proxy with TLS may change `Host` to the name that it connects to."""
    names = HostNames(ServeOptions(allowed_hosts=("rb.example.com",)))
    assert names.accept_origin("http://localhost:8900", "localhost:8900")
    assert names.accept_origin("https://rb.example.com", "127.0.0.1:8900")
    for origin in (
        "null",
        "http://localhost:3000",
        "https://localhost",
        "file://localhost:8900",
        "http://evil.example",
    ):
        assert not names.accept_origin(origin, "localhost:8900"), origin


def refusals(http: httpx.Client, reason: str) -> float:
    """Read the metric; parsing those of all runs of the shared service takes seconds."""
    name = "replaybuf_requests_refused"
    lines = [line for line in http.get("/metrics").text.splitlines(keepends=True) if name in line]
    (family,) = text_string_to_metric_families("".join(lines))
    assert family.name == name
    return next(sample.value for sample in family.samples if sample.labels == {"reason": reason})


FOREIGN_PAGES = [
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("marks", FOREIGN_PAGES)
def test_a_foreign_page_cannot_attach_to_a_run_or_read_it(run: RunClient, marks: dict[str, str]) -> None:
    """Without a Content-Type, so that the browser asks for no permission first; the run keeps its epoch."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    body = b'{"dp_world_size": 1, "resume_step": 0}'
    refused_before = refusals(run.http, "foreign_page")
    for refused in (
        run.http.post(f"/v1/runs/{run.run}/attach", content=body, headers=marks),
        run.http.post(f"/v1/runs/{run.run}/attach", content=body, headers=marks | {"content-type": "application/json"}),
        run.http.get(f"/v1/runs/{run.run}", headers=marks),
        run.http.get("/unknown", headers=marks),
    ):
        assert (refused.status_code, refused.headers["content-type"]) == (403, "application/problem+json")
        assert refused.json()["type"] == "urn:replaybuf:problem:forbidden"
        assert "--allowed-host" in refused.json()["detail"]
    assert run.http.get(f"/v1/runs/{run.run}").json()["epoch"] == epoch
    assert refusals(run.http, "foreign_page") == refused_before + 4


def test_a_foreign_name_is_refused_on_every_path(run: RunClient) -> None:
    """A page whose name was rebound to this address; its origin is then its host."""
    run.put(batch={"groups_per_batch": 1})
    refused_before = refusals(run.http, "foreign_host")
    paths = ("/", "/healthz", "/readyz", "/metrics", "/v1/runs", f"/v1/runs/{run.run}", "/unknown")
    for path in paths:
        headers = {"host": "evil.example:8900", "origin": "http://evil.example:8900", "sec-fetch-site": "same-origin"}
        refused = run.http.get(path, headers=headers)
        assert (refused.status_code, refused.json()["value"]) == (403, "evil.example:8900"), path
    assert refusals(run.http, "foreign_host") == refused_before + len(paths)


def test_the_console_works_from_its_own_origin_and_by_a_link(service: ServeProcess) -> None:
    """A browser shows it at either name of the machine, and its calls are of the same origin."""
    port = service.url.rpartition(":")[2]
    for name in ("127.0.0.1", "localhost"):
        host = f"{name}:{port}"
        typed = {"host": host, "sec-fetch-site": "none", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        linked = typed | {"sec-fetch-site": "cross-site"}
        fetched = {"host": host, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
        with httpx.Client(base_url=service.url) as http:
            assert http.get("/", headers=typed).status_code == 200
            assert http.get("/", headers=linked).status_code == 200
            assert http.get("/", headers=linked | {"sec-fetch-dest": "iframe"}).status_code == 403
            assert http.get("/v1/runs", headers=linked).status_code == 403
            assert http.get("/v1/runs", headers=fetched).status_code == 200
            assert http.get("/v1/runs", headers={"host": host, "origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", b"400"),
        (b"GET /healthz HTTP/1.0\r\n", b"200"),
    ],
)
def test_http_1_1_needs_one_host(service: ServeProcess, head: bytes, status: bytes) -> None:
    """A load balancer that speaks HTTP/1.0 sends none; no browser does."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(head + b"Connection: close\r\n\r\n")
        assert raw.recv(100).split()[1] == status


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_a_body_needs_a_content_type_that_no_plain_form_can_send(run: RunClient, content_type: str | None) -> None:
    run.put(batch={"groups_per_batch": 1})
    body, headers = b'{"dp_world_size": 1, "resume_step": 0}', {"content-type": content_type} if content_type else {}
    refused = run.http.post(f"/v1/runs/{run.run}/attach", content=body, headers=headers)
    assert refused.status_code == 415
    assert (content_type or "missing") in refused.json()["detail"]
