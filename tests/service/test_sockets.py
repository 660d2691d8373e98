"""Where a service listens: TCP, a unix socket, both; what it refuses."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from replaybuf.cli.look.status import show_status
from replaybuf.cli.service import ServiceOptions
from replaybuf.client.addresses import addresses_of
from replaybuf.client.client import AsyncClient, Client
from replaybuf.errors import Invalid, ServiceUnavailable
from replaybuf.service.options import ServeOptions
from replaybuf.service.sockets import open_sockets
from tests.conftest import STOP_TIMEOUT_S


@contextmanager
def served(folder: Path) -> Iterator[Path]:
    """Start a service that listens on a unix socket alone, and stop it."""
    path = folder / "rb.sock"
    command = [sys.executable, "-m", "replaybuf", "serve", "--no-tcp", "--data-dir", str(folder / "data")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | {"REPLAYBUF_SERVE_UDS": str(path)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        reported = []
        for line in process.stdout:
            reported.append(line)
            if line.startswith("listening"):
                break
        assert reported[-1:] == [f"listening on unix:{path}\n"], (folder / "log").read_text()
        yield path
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0
        process.stdout.close()


@pytest.fixture(scope="module")
def on_a_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A service that listens on a unix socket alone; it deletes the socket at its end."""
    with served(tmp_path_factory.mktemp("uds")) as path:
        yield path
    assert not path.exists()


def test_a_service_leaves_the_socket_of_its_successor_alone(tmp_path: Path) -> None:
    """The successor binds the path while the first one ends: it has closed its own socket, and waits for requests."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as successor:
        with served(tmp_path) as path:
            path.unlink()
            successor.bind(str(path))
        assert path.is_socket()


def test_a_service_answers_on_its_unix_socket(on_a_socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocking and asyncio clients, alone or beside addresses that do not answer; `status` too."""
    url = f"unix:{on_a_socket}"
    with Client(url, "r") as client:
        client.put_run({"batch": {"groups_per_batch": 1}})
    with Client(f"http://127.0.0.1:9,{url}", "r", timeout_s=5.0, retry_for_s=5.0) as client:
        assert client.get_run().state == "running"
        assert client.address == url

    async def main() -> str:
        async with AsyncClient(f"unix://{on_a_socket}", "r") as client:
            return str((await client.get_run()).run)

    assert asyncio.run(main()) == "r"
    show_status(ServiceOptions(url=url), "r", Console(width=200))
    assert "run r" in capsys.readouterr().out


def test_only_its_user_can_connect_to_a_unix_socket(on_a_socket: Path) -> None:
    """It needs no tokens, as loopback needs none: other users do not get to it."""
    assert stat.S_IMODE(on_a_socket.stat().st_mode) == 0o600


# httpcore leaves a socket that does not connect to be closed by the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_the_error_names_a_socket_without_listener(tmp_path: Path) -> None:
    url = f"unix:{tmp_path / 'none.sock'}"
    with Client(url, "r") as client, pytest.raises(ServiceUnavailable) as raised:
        client.get_run()
    assert url in str(raised.value)
    del raised
    gc.collect()


def test_addresses_of_unix_sockets_are_absolute() -> None:
    assert addresses_of("unix:/a/b.sock, http://h:1/,unix:///a/b.sock") == ("unix:/a/b.sock", "http://h:1")
    for url in ("unix:b.sock", "unix:", "unix:/a,"):
        with pytest.raises(Invalid, match="unix:/PATH"):
            addresses_of(url)


def test_addresses_are_written_as_browsers_write_them() -> None:
    written = "HTTP://Node:80/,https://u:P@B.example:443,http://[::1]:8900,https://b.example:80"
    as_browsers = ("http://node", "https://u:P@b.example", "http://[::1]:8900", "https://b.example:80")
    assert addresses_of(written) == as_browsers


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:1",
        "http://",
        "http:///x",
        "ftp://h",
        "http://[::1",
        "http://h:x",
        "http://h:0",
        "http://h:70000",
        "http://a b",
    ],
)
def test_invalid_addresses_are_rejected(url: str) -> None:
    with pytest.raises(Invalid, match="HOST:PORT"):
        addresses_of(url)


def options(path: Path) -> ServeOptions:
    """Listen on a unix socket alone."""
    return ServeOptions(tcp=False, uds=path)


def test_the_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rb.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    (listening,) = open_sockets(options(path)).values()
    with listening, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(str(path))


def test_a_socket_in_use_and_another_file_are_left_alone(tmp_path: Path) -> None:
    """Also where the one who listens is too busy to take another connection."""
    path, plain = tmp_path / "rb.sock", tmp_path / "precious"
    plain.write_text("precious")
    with pytest.raises(ServiceUnavailable, match=r"precious.*not a socket"):
        open_sockets(options(plain))
    assert plain.read_text() == "precious"
    (first,) = open_sockets(options(path)).values()
    with first, pytest.raises(ServiceUnavailable, match=r"another process listens.*--uds"):
        open_sockets(options(path))
    too_long = tmp_path / ("x" * 120)
    with pytest.raises(ServiceUnavailable, match="too long"):
        open_sockets(options(too_long))


def test_a_service_without_address_is_rejected() -> None:
    with pytest.raises(Invalid, match="set one of them"):
        open_sockets(ServeOptions(tcp=False))
