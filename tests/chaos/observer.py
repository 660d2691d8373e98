"""Observer of run states, ledger and groups at every server while the load runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from replaybuf.client.client import Client
from replaybuf.wire.answer.browse import GroupPage, GroupSummary
from tests.chaos.calling import TIMEOUT_S, observed
from tests.chaos.history import GroupSeen, LedgerSeen, Recorder, StateSeen, now_s

PERIOD_S = 0.15
PAGE = 1000


class Observer:
    """Follows the runs at each server, one thread per pair: a stopped server delays no other."""

    def __init__(self, urls: list[str], runs: list[str], folder: Path) -> None:
        self.recorder = Recorder(folder, "observer")
        self._stopping = threading.Event()
        self._follows = [Follower(url, run, self.recorder) for url in urls for run in runs]
        self._threads = [threading.Thread(target=self._follow, args=(follower,)) for follower in self._follows]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Look once more and end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for follower in self._follows:
            follower.look()
            follower.close()

    def _follow(self, follower: Follower) -> None:
        while not self._stopping.wait(PERIOD_S):
            follower.look()


class Follower:
    """Follows one run at one server: its state, and new entries of ledger and index."""

    def __init__(self, url: str, run: str, recorder: Recorder, retry_for_s: float = 0.0) -> None:
        self._url, self._run, self._recorder = url, run, recorder
        self._client = Client(url, run, timeout_s=TIMEOUT_S, retry_for_s=retry_for_s)
        self._entry = 0
        self._number = 0

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def look(self) -> None:
        """Record the state and all new entries."""
        seen = observed(self._run, self._client, self._client.get_run)
        if seen.result is None:
            return
        self._recorder.write(StateSeen(**seen.seen, state=msgspec.to_builtins(seen.result)))
        self._follow_ledger()
        self.follow_groups()

    def _follow_ledger(self) -> None:
        while True:
            page = observed(self._run, self._client, lambda: self._client.get_ledger(self._entry, PAGE)).result
            if page is None or not page.records:
                return
            self._recorder.write(*(self._ledger_seen(record) for record in page.records))
            self._entry = page.records[-1]["entry"]

    def follow_groups(self, *, last: bool = False) -> None:
        """Record new groups; with `last`, all groups."""
        self._number = 0 if last else self._number
        while True:
            page = observed(self._run, self._client, self._next_groups).result
            if page is None or not page.groups:
                return
            self._recorder.write(*(self._group_seen(group, last) for group in page.groups))
            self._number = page.groups[-1].number

    def _next_groups(self) -> GroupPage:
        return self._client.list_groups(None, PAGE, self._number)

    def _ledger_seen(self, record: dict[str, Any]) -> LedgerSeen:
        fields = {name: value for name, value in record.items() if name != "entry"}
        return LedgerSeen(at_s=now_s(), run=self._run, server=self._url, entry=record["entry"], record=fields)

    def _group_seen(self, group: GroupSummary, last: bool) -> GroupSeen:
        return GroupSeen.of(group, at_s=now_s(), run=self._run, server=self._url, last=last)
