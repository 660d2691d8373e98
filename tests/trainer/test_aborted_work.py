"""Doomed groups end at a real engine: its own counter shows the aborts, and it samples nothing more for them."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.cli.test_generate import generator
from tests.conftest import RunClient
from tests.trainer import generated_words
from tests.trainer.engine_process import TIMEOUT_S, bounded
from tests.trainer.served import LONG, WORD, ServedEngine
from tests.waiting import until

ABORTED = 'vllm:request_success_total{finished_reason="abort"}'
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
SAMPLED = "vllm:generation_tokens_total"
GROUPS, ROLLOUTS = 6, 4


def test_a_paused_run_frees_the_engine_of_its_groups(
    tmp_path: Path, run: RunClient, models: Path, engine: ServedEngine
) -> None:
    """The heartbeat of the generator learns of the pause; nobody returns the tickets but the generator."""
    batch = {"groups_per_batch": 3, "tokens_per_batch": None, "seq_len": 256}
    assert run.put(batch=batch, group_size=ROLLOUTS, tickets={"heartbeat_s": 1}).status_code == 201

    async def main() -> None:
        # Frozen between two tokens, so that no group can finish before it is aborted.
        assert engine.http.post("/pause", params={"mode": "keep"}).status_code == 200
        options = {
            "tokenizer": str(models / "a"),
            "max-tokens": "200",
            "prompts": f"{generated_words.__name__}:backwards",
        }
        options |= {"min-inflight-groups": str(GROUPS), "max-inflight-groups": str(GROUPS)}
        url = str(run.http.base_url)
        async with generator(tmp_path, url, run.run, engine.url, **options) as process:
            await until(lambda: run.state()["tickets"]["out"] == GROUPS, TIMEOUT_S)
            await until(lambda: engine.metric(WAITING) == GROUPS * ROLLOUTS, TIMEOUT_S)
            assert run.http.patch(run.path, json={"state": "paused"}).status_code == 200
            await until(lambda: engine.metric(ABORTED) == GROUPS * ROLLOUTS, TIMEOUT_S)
            await until(lambda: run.state()["tickets"]["out"] == 0, TIMEOUT_S)
            assert engine.metric(WAITING) == 0
            engine.http.post("/resume")
            assert engine.metric(SAMPLED) == 0, "it samples nothing for groups that are gone"
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        tickets = run.state()["tickets"]
        assert (tickets["returned"], tickets["failed"], tickets["expired"]) == (GROUPS, 0, 0)

    bounded(main())


def test_a_caller_that_leaves_in_the_middle_ends_its_own_rows_only(engine: ServedEngine) -> None:
    """Frozen between two tokens, so that the counter of tokens stands still."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=engine.url, timeout=TIMEOUT_S) as client:
            is_held = engine.hold()
            leaves = asyncio.create_task(client.post("/v1/completions", json={"prompt": WORD, **LONG}))
            await until(is_held, TIMEOUT_S)
            assert engine.http.post("/pause", params={"mode": "keep"}).status_code == 200
            sampled, running = engine.metric(SAMPLED), engine.metric(RUNNING)
            leaves.cancel()
            await until(lambda: engine.metric(ABORTED) > 0, TIMEOUT_S)
            stays = asyncio.create_task(client.post("/v1/completions", json={"prompt": WORD, "max_tokens": 3}))
            engine.http.post("/resume")
            answer = (await stays).json()
            assert engine.metric(SAMPLED) == sampled + answer["usage"]["completion_tokens"]
            assert 0 < engine.metric(ABORTED) == running

    bounded(main())
