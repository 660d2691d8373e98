"""A thread that appends groups while a test breaks something, and records what was acknowledged."""

from __future__ import annotations

import threading
import time

from tests.conftest import RunClient, group

WITHIN_S = 30.0


class Appender(threading.Thread):
    """Appends one group after the other; each is repeated until it is acknowledged.

    `longest_s`: the longest time between two acknowledgements; `reasons`: what the service said meanwhile.
    """

    def __init__(self, run: RunClient) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[str] = []
        self.reasons: set[str] = set()
        self.longest_s = 0.0
        self._run, self._ended = run, threading.Event()

    def run(self) -> None:
        last_s = time.monotonic()
        while not self._ended.is_set():
            name = f"g{len(self.acknowledged)}"
            reply = self._run.post("groups", groups=[group(name)])
            if reply.status_code != 200:
                assert reply.status_code == 503, reply.text
                self.reasons.add(reply.json()["detail"])
                self._ended.wait(0.05)
                continue
            now_s = time.monotonic()
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s
            self.acknowledged.append(name)

    def stop(self) -> None:
        self._ended.set()
        self.join(WITHIN_S)
        assert not self.is_alive()
