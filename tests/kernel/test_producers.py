"""Producers that are gone: only those that sent heartbeats, and only after the server has listened long enough."""

from __future__ import annotations

import pytest

from replaybuf.kernel.state.producers import KNOWN_S, MOST_KNOWN, PerMinute, Producers

HEARTBEAT_S = 15.0


class Server:
    """A table of producers, looked at four times a second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.producers = Producers(0.0)

    def heartbeat(self, name: str) -> None:
        """Announce a producer."""
        self.producers.announce([name], self.now_s)

    def work(self, for_s: float, *, heard: bool = True) -> list[str]:
        """Look for some time; list those that are gone since."""
        gone: list[str] = []
        for _ in range(int(for_s * 4)):
            self.now_s += 0.25
            gone += self.producers.listen(self.now_s, HEARTBEAT_S, heard=heard)
        return gone


def test_a_producer_that_stops_its_heartbeats_is_gone_once() -> None:
    server = Server()
    server.heartbeat("a")
    assert server.work(14.75) == []
    assert server.work(0.25) == ["a"]
    assert server.work(60.0) == []
    assert [producer.name for producer in server.producers.list_gone()] == ["a"]


def test_any_call_of_a_producer_keeps_it_alive_and_brings_it_back() -> None:
    server = Server()
    server.heartbeat("a")
    for _ in range(9):
        assert server.work(10.0) == []
        server.producers.see("a", server.now_s)
    assert server.work(15.0) == ["a"]
    server.producers.see("a", server.now_s)
    assert server.producers.list_gone() == []
    assert server.work(15.0) == ["a"], "it is gone again"


def test_a_producer_without_heartbeats_is_never_gone() -> None:
    """A loop of ten lines that only takes tickets and appends must not lose them."""
    server = Server()
    server.producers.see("silent", server.now_s)
    server.heartbeat("a")
    assert server.work(600.0) == ["a"]


def test_a_process_that_stood_still_has_not_listened() -> None:
    """The heartbeats of that time are still in its sockets: of a pause of 200 s, 1 s counts."""
    server = Server()
    server.heartbeat("a")
    for _ in range(14):
        server.now_s += 200.0
        assert server.producers.listen(server.now_s, HEARTBEAT_S, heard=True) == []
    assert server.work(1.0) == ["a"]


def test_time_in_which_no_call_could_be_answered_does_not_count() -> None:
    """Redis was away, or another server led."""
    server = Server()
    server.heartbeat("a")
    assert server.work(600.0, heard=False) == []
    assert server.work(14.75) == []
    assert server.work(0.25) == ["a"]


def test_a_new_leader_counts_from_its_own_start() -> None:
    server = Server()
    server.heartbeat("a")
    assert server.work(10.0) == []
    server.producers.start_over(server.now_s)
    assert server.work(14.75) == []
    assert server.work(0.25) == ["a"]


def test_producers_are_forgotten_after_an_hour_and_beyond_a_thousand() -> None:
    """A client that invents a name per call must not fill the memory."""
    producers = Producers(0.0)
    for number in range(3 * MOST_KNOWN):
        producers.announce([f"p{number}"], 0.0)
    assert producers.count_known(0.0) == MOST_KNOWN
    assert [producers.find(f"p{n}") is None for n in (2 * MOST_KNOWN - 1, 2 * MOST_KNOWN)] == [True, False]
    assert producers.count_known(KNOWN_S + 1.0) == 0


@pytest.mark.parametrize("every_s", [1.0, 7.0])
def test_the_rate_of_a_steady_producer_is_its_groups_per_minute(every_s: float) -> None:
    rate, now_s = PerMinute(), 0.0
    while now_s < 600.0:
        now_s += every_s
        rate.add(1, now_s)
    assert rate.read(now_s) == pytest.approx(60.0 / every_s, rel=0.15)
    assert rate.read(now_s + 120.0) == 0.0
