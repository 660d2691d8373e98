"""Reader of the cursor of each run, beside its trainer: `python -m tests.chaos.reader`. Ends on SIGTERM.

It keeps nothing itself: after a kill the cursor says where it goes on.
"""

from __future__ import annotations

import argparse
import random
import threading
from pathlib import Path

from replaybuf.client.client import Client
from replaybuf.wire.answer.browse import StoredGroup
from tests.chaos.calling import TIMEOUT_S, observed, run_threads, stop_event
from tests.chaos.content import checksum, tokens_of
from tests.chaos.history import OK, CursorMoved, CursorRead, Recorder
from tests.chaos.runs import CURSOR

RETRY_FOR_S = 8.0
PAGE = 50
WAIT_MS = 400
PAUSE_S = (0.05, 0.3)
AGAIN = 0.1
"""Share of pages that are read again, as after a crash of the reader."""


def read_page(client: Client, run: str, recorder: Recorder, *, last: bool = False) -> tuple[int, str] | None:
    """Read a page and record it; return the number of its last group and its position, None without a group."""
    asked = observed(run, client, lambda: client.read_cursor(CURSOR, limit=PAGE, wait_ms=WAIT_MS))
    if asked.result is None:
        recorder.write(CursorRead(**asked.seen))
        return None
    page = asked.result
    wrong = [f"{group.group_id} {difference}" for group in page.groups if (difference := _difference_of(group))]
    numbers, missed = [group.number for group in page.groups], page.gap.groups if page.gap else 0
    recorder.write(CursorRead(**asked.seen, numbers=numbers, missed=missed, wrong=wrong, last=last))
    return (numbers[-1], page.position) if numbers else None


def _difference_of(group: StoredGroup) -> str | None:
    """Say what is wrong with the content of a group; None if nothing is."""
    if not group.rollouts:
        where = f"number {group.number}, {group.state}, reason {group.reason}, batches {group.batches}"
        return f"without its tokens: {where}, {group.detail}"
    tokens = [checksum(rollout.prompt_ids + rollout.completion_ids) for rollout in group.rollouts]
    right = [checksum(tokens_of(group.group_id, group.prompt_id, n)) for n in range(len(tokens))]
    return None if tokens == right else "with other tokens"


def move(client: Client, run: str, recorder: Recorder, number: int, position: str) -> bool:
    """Report groups as done; return whether that was answered."""
    moved = observed(run, client, lambda: client.advance_cursor(CURSOR, position))
    recorder.write(CursorMoved(**moved.seen, number=number))
    return bool(moved.seen["outcome"] == OK)


def read(url: str, run: str, recorder: Recorder, rng: random.Random, stopping: threading.Event) -> None:
    """Read until `stopping` is set."""
    with Client(url, run, timeout_s=TIMEOUT_S, retry_for_s=RETRY_FOR_S) as client:
        while not stopping.wait(rng.uniform(*PAUSE_S)):
            page = read_page(client, run, recorder)
            if page and rng.random() > AGAIN:
                move(client, run, recorder, *page)


def main() -> None:
    """Read the command line and read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True, nargs="+")
    parser.add_argument("--name", required=True)
    parser.add_argument("--history", required=True, type=Path)
    options = parser.parse_args()
    stopping = stop_event()
    recorder = Recorder(options.history, options.name)
    threads = [
        threading.Thread(target=read, args=(options.url, run, recorder, random.Random(), stopping))
        for run in options.run
    ]
    run_threads(threads)
    recorder.close()


if __name__ == "__main__":
    main()
