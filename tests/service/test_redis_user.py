"""A Redis user with no more rights than docs/security.md gives it, and Redis behind TLS."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import shlex
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import trustme

from tests.cli.test_main import replaybuf
from tests.conftest import RunClient, ServeProcess, group
from tests.valkeys import Valkey
from tests.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
TIMEOUT_S = 30.0


def documented_rule() -> list[str]:
    """The command of the page, as one list of words."""
    match = re.search(r"^ACL SETUSER .*?(?=\n```)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert match is not None
    return shlex.split(match[0].replace("\\\n", " "))


def test_a_service_lives_a_whole_run_with_the_rights_of_the_page(
    tmp_path: Path, connect: Callable[[str, str], RunClient]
) -> None:
    """It stores, trains, checkpoints, frees and deletes. It may not read other keys."""
    with Valkey(tmp_path / "valkey") as valkey:
        valkey.client.execute_command(*documented_rule())  # type: ignore[no-untyped-call]
        url = f"redis://replaybuf:PASSWORD@127.0.0.1:{valkey.port}/0"
        server = ServeProcess(tmp_path / "data", "--redis-url", url).start()
        try:
            run = connect(server.url, "limited")
            run.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 9}})
            tickets = run.post("tickets", producer="p", count=2).json()["tickets"]
            run.append(*(group(None, ticket=ticket["ticket"]) for ticket in tickets))
            epoch = run.attach()
            run.train(epoch, range(2))
            assert run.post("checkpoints", epoch=epoch, step=2, keep=1).status_code == 200
            eventually(lambda: not list(valkey.client.scan_iter("rb:p:*")), TIMEOUT_S)
            assert run.http.patch(run.path, json={"state": "finished"}).status_code == 200
            assert run.http.delete(run.path).status_code == 204
            eventually(lambda: not valkey.client.exists("rb:{limited}:led"), TIMEOUT_S)
            assert run.http.get("/readyz").json()["durability"] == "strict"
            log = server.log()
        finally:
            server.end()
        assert "NOPERM" not in log, log
        denied = valkey.client.execute_command("ACL", "LOG")  # type: ignore[no-untyped-call]
        assert not denied


@contextlib.contextmanager
def behind_tls(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """Listen with TLS in front of a port; yield the new port."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, ahead), copy(behind, writer))

    async def main() -> None:
        server = await asyncio.start_server(connect, "127.0.0.1", 0, ssl=context)
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        started.set_result((server.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(end.set)))
        await end.wait()
        server.close()

    started: concurrent.futures.Future[tuple[int, Callable[[], object]]] = concurrent.futures.Future()
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    listening, stop = started.result(TIMEOUT_S)
    try:
        yield listening
    finally:
        stop()
        thread.join(TIMEOUT_S)


def issued_by_new_authority(certificate: Path) -> ssl.SSLContext:
    """Write the certificate of a new authority; return the context of a server on 127.0.0.1 that it vouches for."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(str(certificate))
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def test_a_redis_behind_tls_is_used_if_its_certificate_is_trusted(
    tmp_path: Path, connect: Callable[[str, str], RunClient]
) -> None:
    context = issued_by_new_authority(tmp_path / "ca.pem")
    with Valkey(tmp_path / "valkey") as valkey, behind_tls(valkey.port, context) as port:
        untrusted = replaybuf(
            "serve", "--data-dir", str(tmp_path / "none"), "--port", "0", "--redis-url", f"rediss://127.0.0.1:{port}/0"
        )
        assert untrusted.returncode == 1 and "certificate verify failed" in untrusted.stderr
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'ca.pem'}"
        server = ServeProcess(tmp_path / "data", "--redis-url", url).start()
        try:
            run = connect(server.url, "tls")
            run.put(batch={"groups_per_batch": 1})
            run.append(group("a"))
            assert len(run.train(run.attach(), range(1))) == 1
        finally:
            server.end()
