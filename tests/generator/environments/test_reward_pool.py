"""Rewards in worker processes: hanging ones are killed, dead ones replaced, and the next group is scored."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

import pytest

from replaybuf.errors import ReplaybufError, RewardFault
from replaybuf.generator.environments.reward_pool import Job, RewardPool
from replaybuf.wire.pipes import framed
from tests.generator.doubles import TIMEOUT_S, make_prompt

HERE = "tests.generator.reward_functions"
PROMPT = make_prompt("cab", answer="bac", level=2)


def pooled(
    main: Callable[[RewardPool], Awaitable[None]],
    *,
    environment: str = f"{HERE}:scripted",
    processes: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(4 * TIMEOUT_S),
            RewardPool(environment, processes=processes, timeout_s=timeout_s) as pool,
        ):
            await main(pool)

    asyncio.run(run())


async def pid(pool: RewardPool) -> int:
    return int((await pool.score(PROMPT, ["pid"])).rewards[0])


async def fault(pool: RewardPool, completion: str) -> RewardFault:
    with pytest.raises(RewardFault) as caught:
        await pool.score(PROMPT, [completion])
    return caught.value


def test_a_process_scores_the_whole_prompt_with_several_rewards() -> None:
    async def main(pool: RewardPool) -> None:
        scores = await pool.score(PROMPT, ["bac", "x"])
        assert scores.rewards.tolist() == [2.5, 0.5]
        assert {name: part.tolist() for name, part in scores.parts.items()} == {
            "scripted": [1.0, 0.0],
            "waited": [3.0, 1.0],
            "waited.half": [1.5, 0.5],
        }
        assert await pid(pool) != os.getpid()

    pooled(main, environment=f"{HERE}:scripted,{HERE}:waited:0.5")


def test_worker_processes_return_process_rewards() -> None:
    async def main(pool: RewardPool) -> None:
        assert (await pool.score(PROMPT, ["abcd", "ab"])).process_rewards == (
            ((2, 1.0), (4, 0.0)),
            ((1, 1.0), (2, 0.0)),
        )

    pooled(main, environment=f"{HERE}:halves")


def test_a_reward_that_hangs_exits_or_is_nan_costs_only_its_group() -> None:
    async def main(pool: RewardPool) -> None:
        assert (await fault(pool, "nan")).reason == "reward_not_finite"
        first = await pid(pool)
        left = await fault(pool, "raise exit")
        assert (left.reason, "SystemExit(3)" in left.detail) == ("reward_raised", True)
        assert await pid(pool) == first
        ended = await fault(pool, "exit")
        assert (ended.reason, "ended the process" in ended.detail) == ("reward_raised", True)
        second = await pid(pool)
        assert second != first
        late = await fault(pool, "hang")
        assert (late.reason, "did not finish within 2 s" in late.detail) == ("reward_timeout", True)
        assert await pid(pool) not in (first, second)
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)

    pooled(main, timeout_s=2.0)


def test_the_answer_of_a_cancelled_job_is_dropped() -> None:
    async def main(pool: RewardPool) -> None:
        before = await pid(pool)
        job = asyncio.ensure_future(pool.score(PROMPT, ["hang"]))
        await asyncio.sleep(0)
        job.cancel()
        await asyncio.wait([job])
        assert (await pool.score(PROMPT, ["bac"])).rewards.tolist() == [1.0]
        assert await pid(pool) != before

    pooled(main)


def test_groups_are_scored_side_by_side() -> None:
    async def main(pool: RewardPool) -> None:
        hanging = asyncio.ensure_future(pool.score(PROMPT, ["hang"]))
        await asyncio.sleep(0)
        assert (await pool.score(PROMPT, ["bac"])).rewards.tolist() == [1.0]
        assert not hanging.done()
        hanging.cancel()
        await asyncio.wait([hanging])

    pooled(main, processes=2)


def test_an_environment_that_does_not_build_is_an_error_at_start() -> None:
    async def main(pool: RewardPool) -> None:
        raise RuntimeError("entered")

    with pytest.raises(ReplaybufError, match=r"does not start: .*no licence on"):
        pooled(main, environment=f"{HERE}:Broken")


async def test_a_worker_ends_with_its_generator_in_the_middle_of_a_score() -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replaybuf.generator.environments.reward_worker", f"{HERE}:scripted"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert worker.stdin is not None and worker.stdout is not None
    await worker.stdout.readexactly(4)
    job = Job(prompt_id="p", text="cab", token_ids=[2], answer=None, metadata={}, where="", completions=["hang"])
    worker.stdin.write(framed(1, job))
    await worker.stdin.drain()
    worker.stdin.close()
    async with asyncio.timeout(TIMEOUT_S):
        assert await worker.wait() == 0
