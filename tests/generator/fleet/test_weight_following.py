"""New weights while rollouts are in flight, on engines whose tokens show the version that sampled them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from replaybuf.errors import EngineAway, EngineFault
from replaybuf.generator.engines import Sample, Sampling, VllmEngine
from replaybuf.generator.fleet import TRIES, Fleet
from replaybuf.generator.fleet import fleet as fleet_module
from replaybuf.generator.fleet import member as member_module
from replaybuf.generator.fleet.publication import OnPublish, pieces
from tests.generator.doubles import TIMEOUT_S, Gate
from tests.generator.engines.rule_engine import PROMPT, ByRule, logprob, next_token
from tests.generator.fleet.test_fleet import fleet_of
from tests.ports import free_port
from tests.waiting import until

SAMPLING = Sampling(n=2, max_tokens=6)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "PROBE_FIRST_S", 0.01)
    monkeypatch.setattr(fleet_module, "RETRY_PAUSE_S", 0.01)


def versions_of(made: Sample) -> list[list[tuple[int, int]]]:
    """Return the segments of every rollout, after a check of each token and logprob against the rule of its version."""
    reported = []
    for piece in pieces(made):
        context = list(PROMPT)
        for version, start, end in piece.spans.tolist():
            assert len(context) == len(PROMPT) + start
            for place in range(start, end):
                assert piece.token_ids[place] == next_token(context, version)
                assert piece.logprobs[place] == logprob(int(piece.token_ids[place]), version)
                context.append(int(piece.token_ids[place]))
        assert len(context) == len(PROMPT) + len(piece)
        reported.append([(version, end - start) for version, start, end in piece.spans.tolist()])
    return reported


def generate(fleet: Fleet, sampling: Sampling = SAMPLING) -> asyncio.Task[Sample]:
    return asyncio.create_task(fleet.generate(np.array(PROMPT, np.int32), sampling))


# ---------------------------------------------------------------------- aborted rollouts


async def test_an_aborted_rollout_continues_from_its_tokens_with_version_spans() -> None:
    double = ByRule(4)
    double.cuts.append([None, [(3, 2)]])
    async with fleet_of(double, on_publish="abort-and-resume") as fleet:
        made = await generate(fleet)
        assert versions_of(made) == [[(4, 6)], [(3, 2), (4, 4)]]
        assert made.finish_reasons == ("length", "length") and made.policy_version == 3
        assert made.metadata["resumed_requests"] == 1
        _, rest = double.requests
        assert rest["prompt"] == PROMPT + made.completions[1][:2].tolist()
        assert (rest["n"], rest["max_tokens"]) == (1, 4)


async def test_a_rollout_aborted_several_times_keeps_every_token() -> None:
    double = ByRule(5)
    double.cuts.extend([[[(2, 1)], [(2, 3)]], [[(3, 2)]], [[]], [[(4, 1)]]])
    async with fleet_of(double, on_publish="abort-and-resume") as fleet:
        made = await generate(fleet)
        ends = versions_of(made)
        assert [sum(tokens for _, tokens in rollout) for rollout in ends] == [6, 6]
        assert {version for rollout in ends for version, _ in rollout} == {2, 3, 4, 5}
        assert made.metadata["resumed_requests"] == len(double.requests) - 1 == 5


async def test_a_rollout_aborted_before_its_first_token_has_only_the_new_version() -> None:
    double = ByRule(4)
    double.cuts.append([[], []])
    async with fleet_of(double, on_publish="abort-and-resume") as fleet:
        assert versions_of(await generate(fleet)) == [[(4, 6)], [(4, 6)]]


async def test_a_rollout_continues_at_once_on_another_server() -> None:
    loading, other = ByRule(3), ByRule(4)
    loading.cuts.append([[(3, 2)], [(3, 4)]])
    async with fleet_of(loading, other, on_publish="abort-and-resume") as fleet:
        assert versions_of(await generate(fleet)) == [[(3, 2), (4, 4)], [(3, 4), (4, 2)]]
        assert (len(loading.requests), len(other.requests)) == (1, 2)


async def test_a_rollout_that_gets_no_token_fails() -> None:
    double = ByRule(4)
    double.cuts.append([[(4, 1)]])
    double.cuts.extend([[]] for _ in range(TRIES))
    async with fleet_of(double, on_publish="abort-and-resume") as fleet:
        with pytest.raises(EngineAway, match=f"{TRIES} times without a token") as caught:
            await generate(fleet, Sampling(n=1, max_tokens=6))
        assert caught.value.reason == "engine_aborted" and fleet.up


async def test_a_rollout_from_before_a_rewind_is_not_continued() -> None:
    double = ByRule(2)
    double.cuts.append([[(7, 3)]])
    async with fleet_of(double, on_publish="abort-and-resume") as fleet:
        with pytest.raises(EngineFault) as caught:
            await generate(fleet, Sampling(n=1, max_tokens=6))
        assert caught.value.reason == "superseded"


@pytest.mark.parametrize("on_publish", ["drain", "in-flight", "abort"])
async def test_other_policies_sample_an_aborted_rollout_again(on_publish: OnPublish) -> None:
    double = ByRule(4)
    double.cuts.append([None, [(3, 2)]])
    async with fleet_of(double, on_publish=on_publish) as fleet:
        made = await generate(fleet)
        assert versions_of(made) == [[(4, 6)], [(4, 6)]]
        assert double.requests[0] == double.requests[1] and "resumed_requests" not in made.metadata


# ---------------------------------------------------------------------- rollouts of two versions


@pytest.mark.parametrize(
    ("on_publish", "taken"), [("drain", False), ("in-flight", True), ("abort-and-resume", True), ("abort", False)]
)
async def test_a_rollout_of_two_versions_is_accepted_only_by_some_policies(on_publish: OnPublish, taken: bool) -> None:
    double = ByRule(4)
    double.aborts = False
    double.cuts.append([[(3, 2), (4, 4)], [(4, 6)]])
    async with fleet_of(double, on_publish=on_publish) as fleet:
        mixed = [[(3, 2), (4, 4)], [(4, 6)]]
        assert versions_of(await generate(fleet)) == (mixed if taken else [[(4, 6)], [(4, 6)]])
        assert len(double.requests) == (1 if taken else 2) and fleet.status()[0].failures == 0


@pytest.mark.parametrize(("on_publish", "requests"), [("in-flight", 1), ("drain", 2), ("abort-and-resume", 2)])
async def test_without_spans_a_version_change_is_stamped_older_in_flight_and_otherwise_sampled_again(
    on_publish: OnPublish, requests: int
) -> None:
    gate, double = Gate(), ByRule(3, labels=False)
    double.script.append(gate)
    double.cuts.append([None, None])
    async with fleet_of(double, on_publish=on_publish) as fleet:
        asking = generate(fleet)
        await gate.requests(1)
        double.version = 4
        gate.open.set()
        made = await asking
        assert len(double.requests) == requests
        assert made.policy_version == (3 if requests == 1 else 4)


# ---------------------------------------------------------------------- stale engines


async def test_a_server_without_the_published_version_is_suspended() -> None:
    behind, right = ByRule(3), ByRule(4)
    async with fleet_of(behind, right) as fleet:
        fleet.learn_published(4)
        await until(lambda: fleet.status()[0].state == "suspended")
        assert "has version 3; published is 4" in (fleet.status()[0].fault or "") and fleet.waiting is None
        for _ in range(3):
            await generate(fleet)
        assert (len(behind.requests), len(right.requests)) == (0, 3)
        behind.version = 4
        await until(lambda: fleet.status()[0].state == "trial")
        await generate(fleet)
        assert len(behind.requests) == 1 and fleet.status()[0].state == "up"


async def test_a_stale_server_is_probed_at_once_after_the_next_publication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pauses between its probes may be long by then."""
    double = ByRule(3)
    async with fleet_of(double) as fleet:
        for name in ("PROBE_FIRST_S", "PROBE_CEILING_S"):
            monkeypatch.setattr(member_module, name, 100 * TIMEOUT_S)
        fleet.learn_published(4)
        await until(lambda: fleet.waiting == "engine_stale")
        double.version = 5
        fleet.learn_published(5)
        assert versions_of(await generate(fleet)) == [[(5, 6)], [(5, 6)]]


async def test_completions_of_a_server_that_restarted_unnoticed_are_rejected() -> None:
    double = ByRule(4)
    async with fleet_of(double) as fleet:
        fleet.learn_published(4)
        await until(lambda: "weight_info" in double.calls)
        double.version = 0
        asking = generate(fleet)
        await until(lambda: fleet.waiting == "engine_stale")
        assert len(double.requests) == 1 and not asking.done()
        double.version = 5
        assert versions_of(await asking) == [[(5, 6)], [(5, 6)]]


async def test_a_server_with_weights_of_another_run_is_suspended() -> None:
    """One version ahead is normal, because servers are loaded before the publication."""
    double = ByRule(2)
    async with fleet_of(double) as fleet:
        fleet.learn_published(0)
        await until(lambda: fleet.waiting == "engine_stale")
        assert "has version 2; published is 0" in (fleet.status()[0].fault or "")
        asking = generate(fleet)
        double.version = 1
        assert versions_of(await asking) == [[(1, 6)], [(1, 6)]]


async def test_completions_of_a_version_that_is_too_new_are_rejected() -> None:
    double = ByRule(4)
    async with fleet_of(double) as fleet:
        fleet.learn_published(4)
        await until(lambda: "weight_info" in double.calls)
        double.version = 6
        asking = generate(fleet)
        await until(lambda: fleet.waiting == "engine_stale")
        assert len(double.requests) == 1 and not asking.done()
        fleet.learn_published(5)
        assert versions_of(await asking) == [[(6, 6)], [(6, 6)]]


async def test_an_unpublished_version_that_a_server_loses_is_reported_once() -> None:
    lost: list[int] = []
    double = ByRule(4)
    async with fleet_of(double) as fleet:
        fleet.call_on_lost(lost.append)
        fleet.learn_published(3)
        await generate(fleet)
        await fleet.find_lost_versions()
        assert lost == []
        double.version = 3
        await fleet.find_lost_versions()
        await fleet.find_lost_versions()
        assert lost == [3]
        double.version = 4
        await generate(fleet)
        fleet.learn_published(4)
        double.version = 3  # started anew: stale, and nothing of version 4 is lost
        await until(lambda: fleet.waiting == "engine_stale")
        assert lost == [3]


@contextlib.asynccontextmanager
async def process(port: int, version: int, cuts: str, hold: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an engine as a process, and kill it at the end."""
    arguments = ("-m", "tests.generator.engines.rule_engine", str(port), str(version), cuts, str(hold))
    child = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert await line_of(child) == f"http://127.0.0.1:{port}"
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def line_of(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    return (await child.stdout.readline()).decode().strip()


async def test_a_server_killed_during_a_request_and_restarted_is_used_only_with_the_right_weights() -> None:
    """The rollout keeps its tokens; the new process samples the rest."""
    port = free_port()
    server = VllmEngine(f"http://127.0.0.1:{port}", timeout_s=TIMEOUT_S)
    fleet = Fleet([server], patience_s=TIMEOUT_S, on_publish="abort-and-resume")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(fleet.aclose)
        first = await stack.enter_async_context(process(port, 3, "[[[[3, 2]]]]", 1))
        fleet.learn_published(3)
        asking = generate(fleet, Sampling(n=1, max_tokens=6))
        assert await line_of(first) == "held"  # the rest of the rollout
        first.kill()
        await stack.enter_async_context(process(port, 0, "[]", 99))
        await until(lambda: fleet.waiting == "engine_stale")
        assert not asking.done()
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as trainer:
            reply = await trainer.post(f"{server.url}/update_weight_version", json={"new_version": "4"})
            assert reply.is_success
        assert versions_of(await asking) == [[(3, 2), (4, 4)]]
        assert fleet.status()[0].state == "up"


async def test_after_a_rewind_no_server_is_used_before_it_has_other_weights() -> None:
    double = ByRule(7)
    async with fleet_of(double) as fleet:
        fleet.learn_published(7)
        fleet.learn_published(3)
        asking = generate(fleet)
        await until(lambda: double.calls.count("weight_info") >= 2)
        assert fleet.waiting == "engine_stale" and not double.requests
        double.version = 3
        assert versions_of(await asking) == [[(3, 6)], [(3, 6)]]


async def test_a_server_that_reports_no_version_is_checked_by_its_samples() -> None:
    double = ByRule(4)
    double.weight_info = False
    async with fleet_of(double) as fleet:
        fleet.learn_published(4)
        await until(lambda: "weight_info" in double.calls)
        assert versions_of(await generate(fleet)) == [[(4, 6)], [(4, 6)]]


# ---------------------------------------------------------------------- expired work


async def test_a_rollout_too_old_for_every_step_to_come_is_not_continued() -> None:
    gate, double = Gate(), ByRule(3)
    double.cuts.append([[(3, 2)]])

    async def late(request: dict[str, Any]) -> dict[str, Any]:
        await gate(request)
        return await double.by_rule(request)

    double.always = late
    async with fleet_of(double, on_publish="abort-and-resume", max_staleness=1) as fleet:
        asking = generate(fleet, Sampling(n=1, max_tokens=6))
        await gate.requests(1)
        double.version = 5
        fleet.learn_published(5)
        gate.open.set()
        with pytest.raises(EngineFault, match="published is 5, max_staleness of the run is 1") as caught:
            await asking
        assert caught.value.reason == "superseded" and len(double.requests) == 1
