"""Queries of groups over HTTP: conditions, orders, pages beside appends, freed groups, and wrong parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from replaybuf import Client
from replaybuf.errors import Invalid
from replaybuf.kernel.state import group_query
from replaybuf.service.http.call import group_pages
from replaybuf.service.http.call.browse import list_groups
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.contract import AttachRequest
from tests.conftest import RunClient, ServeProcess, group
from tests.led_run import append, on_a_run, train


def rewarded(name: str, reward: float, version: int = 0, **fields: Any) -> dict[str, Any]:
    """Build a group whose mean reward is `reward`."""
    wire = group(name, version, **fields)
    for rollout in wire["rollouts"]:
        rollout["reward"] = reward
    return wire


def ids(run: RunClient, **query: Any) -> list[str]:
    """List the ids of the groups that match, on one page."""
    reply = run.get("groups", **query)
    assert reply.status_code == 200, reply.text
    return [entry["group_id"] for entry in reply.json()["groups"]]


@pytest.fixture(scope="module")
def filled(service: ServeProcess) -> Iterator[RunClient]:
    """A run that trained step 0 with `a` and published version 1; `b` to `e` are live."""
    run = RunClient(service.url, "queried")
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "one-step-off-policy", "options": {"max_staleness": 9}})
    run.append(rewarded("a", 0.7, metadata={"source": "math"}))
    epoch = run.attach()
    run.train(epoch, range(1))
    run.append(rewarded("b", 0.1, metadata={"env": "code"}), rewarded("c", 0.7, 1), rewarded("d", 0.3, 1))
    run.append(rewarded("e", 0.9, prompt_id="twice", metadata={"source": "math", "env": "code"}))
    yield run
    run.http.close()


@pytest.mark.parametrize(
    ("query", "letters"),
    [
        ({}, "abcde"),
        ({"desc": "true"}, "edcba"),
        ({"state": "live"}, "bcde"),
        ({"step": 0}, "a"),
        ({"step": 1}, ""),
        ({"min_reward": 0.7}, "ace"),
        ({"min_reward": 0.2, "max_reward": 0.7}, "acd"),
        ({"min_staleness": 1}, "abe"),
        ({"max_staleness": 0}, "cd"),
        ({"version": 1}, "cd"),
        ({"prompt_id": "twice"}, "e"),
        ({"id_prefix": "tw"}, "e"),
        ({"id_prefix": "b"}, "b"),
        ({"id_prefix": "test/", "order": "reward"}, "bdac"),
        ({"id_prefix": "nobody"}, ""),
        ({"source": "math"}, "ae"),
        ({"source": "code"}, "b"),
        ({"source": ""}, "cd"),
        ({"adapter": ""}, "abcde"),
        ({"order": "reward"}, "bdace"),
        ({"order": "reward", "desc": "true", "limit": 2}, "ec"),
        ({"order": "staleness", "state": "live"}, "cdbe"),
        ({"order": "staleness", "prompt_id": "twice"}, "e"),
        ({"order": "reward", "after": 4}, "ace"),
        ({"desc": "true", "after": 3}, "ba"),
    ],
)
def test_groups_are_found_by_what_they_are(filled: RunClient, query: dict[str, Any], letters: str) -> None:
    assert ids(filled, **query) == list(letters)


@pytest.mark.parametrize(
    ("query", "status", "name"),
    [
        ({"min_reward": "much"}, 400, "min_reward"),
        ({"max_reward": "nan"}, 400, "max_reward"),
        ({"min_reward": "1e39"}, 422, "min_reward"),
        ({"min_reward": 2, "max_reward": 1}, 422, "min_reward"),
        ({"min_staleness": 2, "max_staleness": 1}, 422, "min_staleness"),
        ({"min_staleness": -1}, 422, "min_staleness"),
        ({"version": "1.5"}, 400, "version"),
        ({"step": -1}, 422, "step"),
        ({"adapter": "nobody"}, 422, "adapter"),
        ({"prompt_id": "x" * 257}, 422, "prompt_id"),
        ({"source": "a\nb"}, 422, "source"),
        ({"order": "length"}, 422, "order"),
        ({"order": "reward", "state": "retired"}, 422, "order"),
        ({"order": "reward", "after": 99}, 410, "after"),
        ({"desc": "yes"}, 422, "desc"),
        ({"reward": 1}, 400, "reward"),
    ],
)
def test_a_wrong_parameter_is_named(filled: RunClient, query: dict[str, Any], status: int, name: str) -> None:
    reply = filled.get("groups", **query)
    assert (reply.status_code, reply.json()["name"]) == (status, name), reply.text


@pytest.mark.parametrize("query", [{}, {"order": "reward"}, {"order": "reward", "desc": "true"}, {"max_reward": 0.5}])
def test_pages_neither_skip_nor_repeat_groups_while_others_are_stored(run: RunClient, query: dict[str, Any]) -> None:
    run.put(batch={"groups_per_batch": 100})
    run.append(*(rewarded(f"g{n}", (n * 7 % 5) / 5) for n in range(20)))
    expected, group_ids, after = set(ids(run, **query)), list[str](), 0
    for page in range(20):
        reply = run.get("groups", limit=3, after=after, **query).json()
        group_ids += [group["group_id"] for group in reply["groups"]]
        run.append(rewarded(f"new{page}", page % 2))
        if (after := reply["next"]) is None or not expected.difference(group_ids):
            break
    old = [name for name in group_ids if name.startswith("g")]
    assert sorted(old) == sorted(expected) and len(group_ids) == len(set(group_ids))


def test_freed_groups_are_found_by_their_index_entries(run: RunClient) -> None:
    run.put(batch={"groups_per_batch": 2})
    run.append(rewarded("a", 0.2), rewarded("b", 0.8, prompt_id="p"))
    epoch = run.attach()
    run.train(epoch, range(1))
    run.append(rewarded("c", 0.9, 1, prompt_id="p"))
    run.post("checkpoints", epoch=epoch, step=1)
    assert ids(run, state="retired", min_reward=0.5) == ["b"]
    assert ids(run, step=0, max_reward=0.5) == ["a"]
    assert ids(run, prompt_id="p") == ["b", "c"] and ids(run, prompt_id="p", desc="true") == ["c", "b"]
    assert ids(run, order="reward") == ["c"]
    assert ids(run, order="reward", after=1, desc="true") == []


def test_a_page_ends_early_when_it_has_compared_its_share_of_entries(server: EmbeddedServer) -> None:
    """The next page goes on where this one ended, so that no request reads a million entries."""

    async def work(_: Store, run: Run) -> None:
        await append(run, *(f"g{n}" for n in range(9)))
        for desc in (False, True):
            query = group_query.GroupQuery(prompt_id="p", desc=desc)
            group_ids, after, pages = list[str](), None, 0
            while True:
                page = await list_groups(run, query, after, 100)
                group_ids, after, pages = group_ids + [group.group_id for group in page.groups], page.next, pages + 1
                if after is None:
                    break
            names = [f"g{n}" for n in range(9)]
            assert group_ids == (names[::-1] if desc else names) and pages == 4

    with patch.object(group_pages, "CHECKED_ENTRIES", 3), patch.object(group_pages, "ENTRIES_AT_ONCE", 2):
        on_a_run(server, work)


def test_a_sorted_query_by_prompt_says_when_it_would_read_too_much(run: RunClient, server: EmbeddedServer) -> None:
    async def work(_: Store, run: Run) -> None:
        await append(run, "a", "b", "c", "d")
        with pytest.raises(Exception, match="compares at most 3 groups"):
            await list_groups(run, group_query.GroupQuery(prompt_id="p", order="reward"), None, 100)

    with patch.object(group_pages, "CHECKED_ENTRIES", 3):
        on_a_run(server, work)


def test_other_calls_get_a_turn_after_each_window(server: EmbeddedServer) -> None:
    async def work(_: Store, run: Run) -> None:
        await append(run, *(f"g{n}" for n in range(12)))
        turns, counting = 0, True

        async def count() -> None:
            nonlocal turns
            while counting:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(count())
        matcher = group_query.GroupQuery(min_reward=5.0)
        page = await group_pages.find_page(run, matcher, None, 100)
        counting = False
        await task
        assert page == ([], None) and turns >= 6

    with patch.object(group_query, "WINDOW", 2):
        on_a_run(server, work)


def test_groups_that_are_trimmed_during_a_query_are_left_out(server: EmbeddedServer) -> None:
    async def work(_: Store, run: Run) -> None:
        run.trimming.kept_groups = 1
        epoch = await _attach(run)
        for step in range(4):
            await append(run, f"g{step}", version=step)
            await train(run, epoch, range(step, step + 1))
        find = group_pages.find_page

        async def trimmed_meanwhile(*arguments: Any) -> Any:
            result = await find(*arguments)
            await run.trainer_calls.checkpoint(4, epoch, 1)
            await run.journal.free_payloads(run.spill.forget)
            await run.trimming._trim()
            assert run.state.trimmed
            return result

        with patch("replaybuf.service.http.call.browse.find_page", trimmed_meanwhile):
            page = await list_groups(run, group_query.GroupQuery(), None, 100)
        assert [group.number for group in page.groups] == list(range(run.state.trimmed + 1, 5))

    on_a_run(server, work)


async def _attach(run: Run) -> int:
    return (await run.trainer_calls.attach(AttachRequest(resume_step=0))).epoch


def test_the_client_passes_conditions_on(service: ServeProcess, filled: RunClient) -> None:
    with Client(service.url, filled.run) as client:
        page = client.list_groups("live", min_reward=0.2, order="reward", desc=True, limit=2)
        assert [group.group_id for group in page.groups] == ["e", "c"]
        rest = client.list_groups("live", min_reward=0.2, order="reward", desc=True, after=page.next)
        assert [group.group_id for group in rest.groups] == ["d"]
        with pytest.raises(Invalid, match="min_reward is 2"):
            client.list_groups(min_reward=2, max_reward=1)
