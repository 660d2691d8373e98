"""Hostile requests beside the normal load: `python -m tests.chaos.hostile --attack NAME`.

One attack per server. While it lasts, another connection asks for `/healthz` and the state of the run again and again.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import httpx

from tests.chaos.calling import load_options, run_threads
from tests.chaos.history import Attacked, Recorder, now_s

ATTACK_S = 30.0
"""How long a server may take nothing of an attack, or not answer all of it. On a busy machine sending takes longer."""
HALF_S = 2.0
SOCKET_TIMEOUT_S = 0.5
BESIDE_PAUSE_S = 0.1
BESIDE_TIMEOUT_S = 20.0
HALF_HEADS = 200
CHUNK = 65536
HEAD_BYTES = 64 << 20
"""Size of a head that has no end."""
BODY_BYTES = 60 << 20
OPEN, ENDED = -1, 0


def endless_header(host: str, run: str) -> Iterator[bytes]:
    """Begin a request with one header that has no end."""
    yield b"GET /healthz HTTP/1.1\r\nhost: " + host.encode() + b"\r\nx-long: "
    yield from itertools.repeat(b"a" * CHUNK, HEAD_BYTES // CHUNK)


def many_headers(host: str, run: str) -> Iterator[bytes]:
    """Begin a request with short headers that have no end."""
    yield b"GET /healthz HTTP/1.1\r\nhost: " + host.encode() + b"\r\n"
    yield from itertools.repeat(b"x: y\r\n" * (CHUNK // 6), HEAD_BYTES // CHUNK)


def refused_json(host: str, run: str) -> Iterator[bytes]:
    """Post 60 MiB of JSON that is no group: one rollout of numbers, without an end."""
    begin = b'{"group_id": "hostile", "prompt_id": "h", "policy_version": 0, "rollouts": [{"prompt_ids": [1'
    yield _post(host, run, BODY_BYTES) + begin
    left = BODY_BYTES - len(begin)
    chunk = b",1" * (CHUNK // 2)
    while left:
        yield chunk[: min(left, CHUNK)]
        left -= min(left, CHUNK)


def cut_body(host: str, run: str) -> Iterator[bytes]:
    """Post half of a body and end the connection."""
    yield _post(host, run, 1 << 20) + b'{"groups": [' + b" " * (1 << 19)


def oversized_body(host: str, run: str) -> Iterator[bytes]:
    """Announce 4 GiB of JSON and begin to send it."""
    yield _post(host, run, 4 << 30)
    yield from itertools.repeat(b"[" * CHUNK, BODY_BYTES // CHUNK)


def _post(host: str, run: str, length: int) -> bytes:
    head = f"POST /v1/runs/{run}/groups HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {length}\r\n\r\n".encode()


ATTACKS: dict[str, Callable[[str, str], Iterator[bytes]]] = {
    "endless header": endless_header,
    "many headers": many_headers,
    "refused JSON": refused_json,
    "cut body": cut_body,
    "oversized body": oversized_body,
}
HALF = "half heads"
NAMES = (*ATTACKS, HALF)


class Attack:
    """One attack on one server."""

    def __init__(self, url: str, run: str, attack: str, recorder: Recorder) -> None:
        self._url, self._run, self._name, self._recorder = url, run, attack, recorder
        self._host = url.removeprefix("http://")
        name, _, port = self._host.rpartition(":")
        self._address = name, int(port)
        self._over, self._served = threading.Event(), threading.Event()
        self._beside: Counter[str] = Counter()
        self._sent_bytes = 0
        self._taken_s = 0.0

    def run(self) -> None:
        """Attack while others call, and record the outcome."""
        others = threading.Thread(target=self._call_beside)
        others.start()
        from_s = now_s()
        try:
            status = self._hold_half_heads() if self._name == HALF else self._send()
        finally:
            self._over.set()
            others.join()
        self._recorder.write(
            Attacked(
                at_s=now_s(),
                run=self._run,
                server=self._url,
                attack=self._name,
                from_s=from_s,
                status=status,
                sent_bytes=self._sent_bytes,
                beside=dict(self._beside),
            )
        )

    def _send(self) -> int:
        """Send until the server answers, ends the connection, or takes nothing for too long; return the status."""
        self._taken_s = now_s()
        try:
            with socket.create_connection(self._address, BESIDE_TIMEOUT_S) as connection:
                connection.settimeout(SOCKET_TIMEOUT_S)
                for piece in ATTACKS[self._name](self._host, self._run):
                    if _has_answer(connection) or not self._send_piece(connection, piece):
                        break
                if self._name == "cut body":
                    return ENDED
                return _read_status(connection, self._taken_s + ATTACK_S)
        except OSError:  # refused, or ended by the server
            return ENDED

    def _send_piece(self, connection: socket.socket, piece: bytes) -> bool:
        """Send a piece; return False once the server takes nothing more."""
        view = memoryview(piece)
        while view and now_s() < self._taken_s + ATTACK_S:
            try:
                sent = connection.send(view)
            except TimeoutError:
                continue  # the server reads slowly
            except OSError:  # the server has ended the connection; its answer may be there to read
                return False
            self._sent_bytes += sent
            self._taken_s = now_s()
            view = view[sent:]
        return not view

    def _hold_half_heads(self) -> int:
        """Hold many connections with half a head each."""
        with contextlib.ExitStack() as stack:
            try:
                for _ in range(HALF_HEADS):
                    half = stack.enter_context(socket.create_connection(self._address, BESIDE_TIMEOUT_S))
                    half.sendall(b"GET /healthz HTTP/1.1\r\nhost:")
                    self._sent_bytes += 28
            except OSError:  # the server is away, or takes no more connections
                return ENDED
            self._over.wait(HALF_S)
            self._served.wait(ATTACK_S)
        return ENDED

    def _call_beside(self) -> None:
        """Make normal calls on connections of their own."""
        with httpx.Client(base_url=self._url, timeout=BESIDE_TIMEOUT_S) as http:
            for path in itertools.cycle(("/healthz", f"/v1/runs/{self._run}")):
                try:
                    outcome = str(http.get(path).status_code)
                    self._served.set()
                except httpx.TransportError:
                    outcome = "none"
                self._beside[outcome] += 1
                if self._over.wait(BESIDE_PAUSE_S):
                    return


def _has_answer(connection: socket.socket) -> bool:
    """Return whether the server has answered already, or ended the connection."""
    return bool(select.select([connection], [], [], 0)[0])


def _read_status(connection: socket.socket, ends_s: float) -> int:
    answer = b""
    while b"\r\n" not in answer:
        try:
            piece = connection.recv(CHUNK)
        except TimeoutError:
            if now_s() > ends_s:
                return OPEN
            continue
        if not piece:
            return ENDED
        answer += piece
    return int(answer.split(b" ", 2)[1])


def main() -> None:
    """Attack every server at the same time."""
    options = load_options()
    recorder = Recorder(options.history, options.name)
    attacks = [Attack(url, options.run, options.attack, recorder) for url in options.url.split(",")]
    threads = [threading.Thread(target=attack.run) for attack in attacks]
    run_threads(threads)
    recorder.close()


if __name__ == "__main__":
    main()
