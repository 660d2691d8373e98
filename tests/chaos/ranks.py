"""512 ranks that wait for batches of one run for some seconds, then all are gone: `python -m tests.chaos.ranks`.

Every rank is rank 0 and asks for the next step with the newest epoch. Some calls are recorded in full, the others are
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import aiohttp
import msgspec

from replaybuf.wire.batch import read_batch
from tests.chaos.calling import load_options
from tests.chaos.history import OK, BatchAsked, RanksWaited, Recorder, now_s
from tests.chaos.trainer import read_body

RANKS = 512
RECORDED = 8
"""Ranks whose waits and bodies are recorded in full."""
WORK_S = 3.0
START_S = 30.0
"""How long the first answer may take on a busy machine."""
WAIT_MS = 2000
CALL_TIMEOUT_S = 10.0
PAUSE_S = 0.2
END_S = 1.0


class Ranks:
    """Waiting ranks of one run at the server that leads it."""

    def __init__(self, urls: list[str], run: str, recorder: Recorder) -> None:
        self._urls, self._run, self._recorder = urls, run, recorder
        self._url, self._epoch, self._step = urls[0], 0, 0
        self.outcomes: Counter[str] = Counter()
        self._served = asyncio.Event()

    async def wait(self) -> None:
        """Let all ranks wait, for `WORK_S` from the first answer on, then cut all connections."""
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            ranks = [asyncio.create_task(self._rank(http, number)) for number in range(RANKS)]
            ranks += [asyncio.create_task(self._follow(http, url)) for url in self._urls]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._served.wait(), START_S)
            await asyncio.sleep(WORK_S)
            left = set(ranks)
            while left:  # the timeout of a call may end at the same moment and take the place of the cancellation
                for rank in left:
                    rank.cancel()
                _, left = await asyncio.wait(left, timeout=END_S)
            for rank in ranks:
                if not rank.cancelled():
                    rank.result()

    async def _follow(self, http: aiohttp.ClientSession, url: str) -> None:
        """Keep epoch and step of the run up to date; one server may be away."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with http.get(f"{url}/v1/runs/{self._run}") as reply:
                    state = await reply.json()
                if reply.status == 200 and state["epoch"] >= self._epoch:
                    self._epoch, self._step = state["epoch"], state["step"]
            await asyncio.sleep(PAUSE_S)

    async def _rank(self, http: aiohttp.ClientSession, number: int) -> None:
        while True:
            if not self._epoch:
                await asyncio.sleep(PAUSE_S)
                continue
            sent_s, epoch, step, url = now_s(), self._epoch, self._step, self._url
            asked = {"epoch": epoch, "dp_rank": 0, "wait_ms": WAIT_MS}
            try:
                async with http.get(f"{url}/v1/runs/{self._run}/batches/{step}", params=asked) as reply:
                    content = await reply.read()
            except (aiohttp.ClientError, TimeoutError):
                self.outcomes["unavailable"] += 1
                self._url = random.choice(self._urls)
                await asyncio.sleep(PAUSE_S)
                continue
            outcome = self._outcome(reply.status, content)
            self.outcomes[outcome] += 1
            if outcome not in ("body", "waiting"):
                self._url = random.choice(self._urls)
            else:
                self._served.set()
                if number < RECORDED:
                    self._record(url, sent_s, epoch, step, outcome, content)
            if outcome != "waiting":
                await asyncio.sleep(PAUSE_S)

    def _outcome(self, status: int, content: bytes) -> str:
        if status == 200:
            return "body"
        answer = msgspec.json.decode(content)
        return "waiting" if status == 202 else str(answer["type"]).rpartition(":")[2]

    def _record(self, url: str, sent_s: float, epoch: int, step: int, outcome: str, content: bytes) -> None:
        body = read_body(content) if outcome == "body" else None
        world = read_batch(content).meta.dp_world_size if body else 1
        self._recorder.write(
            BatchAsked(
                at_s=now_s(),
                run=self._run,
                sent_s=sent_s,
                server=url,
                outcome=OK,
                epoch=epoch,
                step=step,
                rank=0,
                world=world,
                body=body,
                waiting=None if body else msgspec.json.decode(content),
            )
        )


def main() -> None:
    """Read the command line and wait."""
    options = load_options()
    recorder = Recorder(options.history, options.name)
    ranks = Ranks(options.url.split(","), options.run, recorder)
    from_s = now_s()
    asyncio.run(ranks.wait())
    recorder.write(
        RanksWaited(at_s=now_s(), run=options.run, from_s=from_s, ranks=RANKS, outcomes=dict(ranks.outcomes))
    )
    recorder.close()


if __name__ == "__main__":
    main()
