"""`replaybuf generate` and a prompt that is issued again because its group was too stale."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cli.test_generate import WORDS, bounded, generator
from tests.conftest import RunClient, group
from tests.generator.doubles import EngineDouble, Gate


def test_a_prompt_that_is_issued_again_is_generated_although_the_generator_is_killed(
    tmp_path: Path, run: RunClient
) -> None:
    """Its first group was too stale. The generator dies while the engine samples the second; its successor makes it."""
    tickets = {"prompts": len(WORDS), "heartbeat_s": 1}
    batch = {"groups_per_batch": 1, "seq_len": 64}
    assert run.put(batch=batch, group_size=4, tickets=tickets, on_stale="reissue").is_success
    url = str(run.http.base_url)
    (slow,) = run.post("tickets", producer="slow", count=1).json()["tickets"]
    last = len(WORDS) - 1

    async def main() -> None:
        epoch, gate = run.attach(), Gate()
        async with EngineDouble().up() as engine:

            async def train(step: int) -> None:
                await asyncio.to_thread(run.ready_batch, step, epoch)
                engine.version = step + 1
                run.ack(step, epoch)
                run.publish(step + 1, epoch)

            async with generator(tmp_path, url, run.run, engine.url) as process:
                for step in range(last):
                    await train(step)
                engine.always = gate
                assert run.append(group(None, ticket=slow["ticket"], rollouts=4))[0]["status"] == "stored"
                await gate.requests(1)
                process.kill()
            engine.always = None
            async with generator(tmp_path, url, run.run, engine.url) as process:
                await train(last)
                _, error = await process.communicate()
                assert process.returncode == 0, error.decode()

    bounded(main())
    assert run.state()["groups"]["evicted"] == {"too_stale": 1}
    names = [f"p{index}" for index in range(1, len(WORDS))]
    prompts = {name: run.get(f"groups/{name}").json()["prompt_id"] for name in [*names, "p0-1"]}
    assert len({*prompts.values()}) == len(WORDS), "the sixth word is the one that no other index has"
