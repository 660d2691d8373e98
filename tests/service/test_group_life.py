"""The life of a group, from its ticket to the checkpoint that freed it."""

from __future__ import annotations

import itertools
from typing import Any

from tests.conftest import RunClient, ServeProcess, group


def life_of(run: RunClient, name: str) -> list[dict[str, Any]]:
    """Return the moments of a group."""
    moments: list[dict[str, Any]] = run.get(f"groups/{name}").json()["life"]
    return moments


def facts(moments: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what happened, with steps and versions, without times."""
    return [(moment["what"], moment.get("step"), moment.get("version")) for moment in moments]


def test_a_group_shows_each_point_of_its_life_with_the_version(own_service: ServeProcess) -> None:
    """In order of time, and the same after kill -9."""
    run = RunClient(own_service.url, "life")
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    for step in range(2):
        (ticket,) = run.post("tickets", producer="p", count=1).json()["tickets"]
        run.append(group(f"g{step}", step, ticket=ticket["ticket"]))
        run.train(epoch, range(step, step + 1))
    assert run.post("checkpoints", epoch=epoch, step=1).is_success
    before = {name: life_of(run, name) for name in ("g0", "g1")}
    run.http.close()
    own_service.kill()
    own_service.start()
    again = RunClient(own_service.url, "life")
    assert {name: life_of(again, name) for name in before} == before
    again.http.close()
    used = [("sampled", None), ("stored", None), ("batch", 1), ("trained", 1), ("published", None)]
    assert facts(before["g0"]) == [
        ("ticket", None, None),
        ("sampled", None, 0),
        ("stored", None, 0),
        ("batch", 0, 0),
        ("trained", 0, 0),
        ("published", None, 1),
        ("freed", None, None),
    ]
    assert [fact[:2] for fact in facts(before["g1"])] == [("ticket", None), *used]
    for moments in before.values():
        times = [moment["at_s"] for moment in moments if moment["what"] != "sampled"]
        assert all(earlier <= later for earlier, later in itertools.pairwise(times))


def test_a_dropped_group_shows_when_and_why(run: RunClient) -> None:
    """It had no ticket, so its life begins with its tokens."""
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "on-policy"})
    epoch = run.attach()
    run.append(group("a"), group("late"))
    run.train(epoch, range(1))
    sampled, stored, evicted = life_of(run, "late")
    assert (sampled["what"], stored["what"], evicted["what"]) == ("sampled", "stored", "evicted")
    assert (evicted["reason"], evicted["version"]) == ("too_stale", 1) and evicted["at_s"] >= stored["at_s"]


def test_a_group_in_two_batches_shows_both(run: RunClient) -> None:
    """The second one is not trained yet."""
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "replay", "options": {"max_uses": 2, "max_staleness": 9}})
    epoch = run.attach()
    run.append(group("a"))
    run.train(epoch, range(1))
    assert run.batch(1, epoch).status_code == 200
    assert facts(life_of(run, "a"))[2:] == [
        ("batch", 0, 0),
        ("trained", 0, 0),
        ("published", None, 1),
        ("batch", 1, 1),
    ]
