"""`replaybuf generate` as a process, between the real service and an engine that answers by script."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from replaybuf.kernel.strategy.contract import source_hash
from tests.conftest import RunClient
from tests.forked import AwaitedProcess, fork_replaybuf
from tests.generator.doubles import EngineDouble, Gate, given_logprob, write_tokenizer
from tests.waiting import patience

WORDS = ("abc", "bca", "cab", "abd", "bad", "dab")
TIMEOUT_S = 60.0
STOP_S = 4.0 + 8.0
"""The promise is 4 s on an idle machine; without it the held requests would take 300 s."""


def write_prompts(folder: Path) -> Path:
    file = folder / "words.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": word, "answer": word[::-1]} for word in WORDS]
    lines[0]["metadata"] = {"source": "first words"}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@contextlib.asynccontextmanager
async def generator(folder: Path, url: str, run: str, engine: str, /, **options: str) -> AsyncIterator[AwaitedProcess]:
    """Start `replaybuf generate`, and kill it at the end if it still runs."""
    flags = {
        "url": url,
        "run": run,
        "engine": engine,
        "environment": "exact-match",
        "prompts": str(write_prompts(folder)),
        "tokenizer": str(write_tokenizer(folder / "model")),
        "max-tokens": "8",
        "metrics-file": str(folder / "generate.jsonl"),
    } | options
    config = flags.pop("config", None)
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
    process = await fork_replaybuf(*(("--config", config) if config else ()), "generate", *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def bounded(main: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S * patience()):
            await main

    asyncio.run(run())


def put(run: RunClient, **config: Any) -> None:
    batch = {"groups_per_batch": 3, "tokens_per_batch": 512, "seq_len": 64}
    assert run.put(batch=batch, group_size=4, **config).status_code == 201


def generated(folder: Path, run: RunClient, **options: str) -> list[dict[str, Any]]:
    """Generate until the run is finished; return its groups."""

    async def main() -> None:
        async with (
            EngineDouble().up() as engine,
            generator(folder, _url(run), run.run, engine.url, **options) as process,
        ):
            _, error = await process.communicate()
            assert process.returncode == 0, error.decode()

    bounded(main())
    return stored(run)


def stored(run: RunClient) -> list[dict[str, Any]]:
    """Read all groups of a run, with their rollouts."""
    return [run.get(f"groups/{entry['group_id']}").json() for entry in run.get("groups").json()["groups"]]


def test_a_run_trains_groups_that_lost_rollouts_to_faults_of_the_engine(tmp_path: Path, run: RunClient) -> None:
    """Of each prompt's four requests the last is refused: every group has three rollouts, and all prompts are used."""
    put(run, tickets={"prompts": 6}, min_group_size=3)
    came: Counter[str] = Counter()

    async def refuse_last(request: dict[str, Any]) -> Response | None:
        came[str(request["prompt"])] += 1
        return Response("no", 400) if came[str(request["prompt"])] == 4 else None

    async def main() -> None:
        async with EngineDouble().up() as engine:
            engine.always = refuse_last
            options = {"rollouts-per-request": "1"}
            async with generator(tmp_path, _url(run), run.run, engine.url, **options) as process:
                epoch = run.attach()
                for step in range(2):
                    await asyncio.to_thread(run.ready_batch, step, epoch)
                    run.ack(step, epoch)
                    run.publish(step + 1, epoch)
                    engine.version = step + 1
                _, error = await process.communicate()
                assert process.returncode == 0, error.decode()

    bounded(main())
    assert [run.get(f"batches/{step}/record").json()["rollouts"] for step in range(2)] == [9, 9]
    groups, tickets = run.state()["groups"], run.state()["tickets"]
    assert (groups["stored"], groups["partial"], groups["rejected"]) == (6, 6, {})
    assert (tickets["returned"], tickets["failed"], tickets["out"]) == (0, 0, 0)
    stored = run.get("groups/p0").json()
    assert len(stored["rollouts"]) == 3 and stored["metadata"]["lost_rollouts"] == {"engine_refused": 1}


def test_a_finite_supply_is_generated_and_trained_and_the_exit_code_is_0(tmp_path: Path, run: RunClient) -> None:
    put(run, tickets={"prompts": 12})

    def train(engine: EngineDouble) -> list[dict[str, Any]]:
        epoch, records = run.attach(), []
        for step in range(4):
            run.ready_batch(step, epoch)
            records.append(run.get(f"batches/{step}/record").json())
            assert run.ack(step, epoch).status_code == 200
            engine.version = step + 1  # the engine has the weights before the version is announced
            assert run.publish(step + 1, epoch).status_code == 200
        return records

    async def main() -> None:
        async with (
            EngineDouble().up() as engine,
            generator(tmp_path, _url(run), run.run, engine.url) as process,
        ):
            records = await asyncio.to_thread(train, engine)
            _, error = await process.communicate()
            assert process.returncode == 0, error.decode()
        used = [entry for record in records for entry in record["groups"]]
        assert sorted(entry["prompt_index"] for entry in used) == list(range(12))
        assert max(entry["staleness"] for entry in used) <= 1
        assert len({entry["prompt_id"] for entry in used}) == len(WORDS)
        sources = {entry["prompt_id"]: entry["source"] for entry in run.get("groups").json()["groups"]}
        assert Counter(sources.values()) == {
            source_hash("first words"): 1,
            source_hash("exact-match"): len(WORDS) - 1,
        }, "by which replay mixes: the prompt's own, else the environment"

    bounded(main())
    state = run.state()
    assert state["groups"]["stored"] == 12
    assert state["groups"]["rejected"] == {}
    assert (state["tickets"]["out"], state["tickets"]["failed"]) == (0, 0)
    last = json.loads((tmp_path / "generate.jsonl").read_text().splitlines()[-1])
    assert (last["groups"], last["rollouts"], last["reward_mean"]) == (12, 48, 1.0)


async def line_of(stream: asyncio.StreamReader | None, text: str) -> str:
    """Read up to a line that contains a text, and return the line."""
    assert stream is not None
    async for line in stream:
        if text in line.decode():
            return line.decode().rstrip()
    raise AssertionError(f"it ended without saying {text!r}")


def test_metrics_are_served_and_sighup_changes_options(tmp_path: Path, run: RunClient) -> None:
    """SIGHUP applies live options; one invalid value or change rejects all of them."""
    put(run)
    config, prompts = tmp_path / "options.toml", tmp_path / "filtered.jsonl"
    config.write_text("[generate]\nmax_inflight_groups = 1\nmetrics_address = 0\nprompt_filter = { max_tokens = 3 }\n")
    prompts.write_text(write_prompts(tmp_path).read_text() + '{"prompt": "abcd", "answer": ""}\n')

    async def main() -> None:
        gate = Gate()
        async with EngineDouble().up() as engine:
            engine.always = gate
            options = {"config": str(config), "prompts": str(prompts)}
            async with generator(tmp_path, _url(run), run.run, engine.url, **options) as process:
                metrics = (await line_of(process.stdout, "metrics at http://")).rpartition(" ")[2]
                await gate.requests(1)
                scraped = (await get(metrics)).text
                assert "replaybuf_generator_groups_limit{" in scraped
                assert 'replaybuf_generator_prompts_dropped{reason="too_long",run="r"} 1.0' in scraped.replace(
                    f'run="{run.run}"', 'run="r"'
                )
                assert (await get(metrics.replace("/metrics", "/healthz"))).json() == {"status": "ok"}

                assert engine.calls.count("completions") == 1
                for text, said in (
                    (
                        "max_inflight_groups = 3\ncompress = true\n",
                        "compress is now True; it is read only",
                    ),
                    ("max_inflight_groups = 0\n", "max_inflight_groups"),
                    ("max_inflight_groups = 'x'\n", "the options do not change: config file"),
                    ("max_inflight_groups = ", "cannot be read"),
                    ("max_inflight_groups = 3\ntemperature = 0.5\n", "changed: temperature=0.5, max_inflight_groups=3"),
                ):
                    # a flag beats the file
                    fixed = "metrics_address = 0\nmax_tokens = 7\nprompt_filter = { max_tokens = 3 }\n"
                    config.write_text(f"[generate]\n{fixed}{text}")
                    process.send_signal(signal.SIGHUP)
                    assert said in await line_of(process.stderr, "options ")
                await gate.requests(2)
                process.send_signal(signal.SIGTERM)
                gate.open.set()
                await process.communicate()
        assert sorted(request["temperature"] for request in engine.requests)[:2] == [0.5, 0.5]

    bounded(main())


async def get(url: str) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.get(url)


def test_own_prompts_and_rewards_run_without_packaging(tmp_path: Path, run: RunClient) -> None:
    put(run, tickets={"prompts": 3})
    options = {
        "prompts": "tests.generator.prompt_functions:finite",
        "environment": "tests.generator.reward_functions:length:0.5,tests.generator.reward_functions:waited",
        "reward-processes": "1",
    }

    groups = generated(tmp_path, run, **options)
    assert len(groups) == 3
    for group in groups:
        for rollout in group["rollouts"]:
            length = len(rollout["completion_ids"])
            assert rollout["rewards"] == {"length": length, "waited": length, "waited.half": length / 2}
            assert rollout["reward"] == 1.5 * length


def test_a_length_penalty_is_in_the_rewards_of_groups_and_not_of_evaluations(tmp_path: Path, run: RunClient) -> None:
    """The engine answers with as many tokens as the prompt has; the reward itself is 1."""
    put(run, tickets={"prompts": 4})
    config, prompts = tmp_path / "options.toml", tmp_path / "lengths.jsonl"
    config.write_text("[generate]\nreward_processes = 1\n[generate.length_penalty]\ncache_tokens = 4\nmax_tokens = 7\n")
    words = ("a", "abc", "abcde", "abcdefgh")
    prompts.write_text("".join(json.dumps({"prompt": word, "answer": word[::-1]}) + "\n" for word in words))
    options = {"config": str(config), "prompts": str(prompts), "eval-prompts": str(prompts)}

    groups = generated(tmp_path, run, **options)
    of_length = {len(rollout["completion_ids"]): rollout for group in groups for rollout in group["rollouts"]}
    assert {length: rollout["reward"] for length, rollout in of_length.items()} == {1: 1.0, 3: 1.0, 5: 0.5, 8: 0.0}
    assert {length: rollout["rewards"] for length, rollout in of_length.items()} == {
        length: {"length_penalty": penalty} for length, penalty in ((1, 0.0), (3, 0.0), (5, -0.5), (8, -1.0))
    }
    assert groups[0]["metadata"]["length_penalty"] == {"max_tokens": 7, "cache_tokens": 4}
    (evaluation,) = run.get("evaluations").json()["evaluations"]
    assert (evaluation["reward_mean"], evaluation["rollouts"]) == (1.0, 4)


def test_logprobs_of_reference_old_policy_and_teacher_come_with_every_group(tmp_path: Path, run: RunClient) -> None:
    put(run, tickets={"prompts": 5})

    async def main() -> None:
        judges = (EngineDouble(model="base"), EngineDouble(model="large"))
        async with EngineDouble().up() as engine, judges[0].up() as reference, judges[1].up() as teacher:
            options = {
                "ref-engine": reference.url,
                "old-engine": engine.url,
                "teacher-engine": teacher.url,
                "logprob-options": json.dumps(
                    {"ref": {"micro_batch": 3}, "old": {"micro_batch": 2}, "teacher": {"served_name": "large"}}
                ),
            }
            async with generator(tmp_path, _url(run), run.run, engine.url, **options) as process:
                _, error = await process.communicate()
                assert process.returncode == 0, error.decode()
            assert {len(request["prompt"]) for request in reference.requests} <= {1, 2, 3}
            old = [request for request in engine.requests if "prompt_logprobs" in request]
            assert {len(request["prompt"]) for request in old} == {2}
            assert {request["model"] for request in teacher.requests} == {"large"}

    bounded(main())
    groups = stored(run)
    assert len(groups) == 5
    for group in groups:
        old = group["metadata"]["old_logprobs"]
        assert (old["model"], old["policy_version"]) == ("tiny", 0)
        for rollout in group["rollouts"]:
            tokens = [*rollout["prompt_ids"][-1:], *rollout["completion_ids"]]
            expected = [given_logprob(before, token) for before, token in itertools.pairwise(tokens)]
            assert rollout["ref_logprobs"] == pytest.approx(expected)
            assert rollout["old_logprobs"] == pytest.approx(expected)
            assert rollout["teacher_logprobs"] == pytest.approx(expected)


def test_tool_tokens_of_several_turns_are_stored_masked(tmp_path: Path, run: RunClient) -> None:
    put(run, tickets={"prompts": 2})
    options = {"environment": "tests.generator.turn_environments:Echo", "max-tokens": "40"}

    groups = generated(tmp_path, run, **options)
    assert len(groups) == 2
    for group in groups:
        for rollout in group["rollouts"]:
            # The engine spells its prompt backwards: 3 letters, answered with 4, then all 10 backwards.
            prompt, completion = rollout["prompt_ids"], rollout["completion_ids"]
            assert completion[:3] == prompt[::-1]
            assert completion[7:] == [*prompt, *completion[:7]][::-1]
            assert rollout["completion_mask"] == [1] * 3 + [0] * 4 + [1] * 10
            assert rollout["inference_logprobs"][3:7] == [0.0] * 4
            assert rollout["version_spans"] == [[0, 0, 17]]
            assert (rollout["reward"], rollout["rewards"]) == (0.5, {"half": 0.25})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_returns_the_tickets_and_ends_it_in_time_with_exit_code_0(
    tmp_path: Path, run: RunClient, number: signal.Signals
) -> None:
    put(run)

    async def main() -> None:
        gate = Gate()
        async with EngineDouble().up() as engine:
            engine.always = gate
            async with generator(tmp_path, _url(run), run.run, engine.url) as process:
                await gate.requests(3)
                process.send_signal(number)
                async with asyncio.timeout(STOP_S):
                    _, error = await process.communicate()
                assert process.returncode == 0, error.decode()
            gate.open.set()

    bounded(main())
    tickets = run.state()["tickets"]
    assert tickets["out"] == 0
    assert tickets["returned"] == tickets["issued"] > 0


def test_a_signal_ends_it_while_it_waits_for_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with generator(tmp_path, "http://127.0.0.1:9", "r", "http://127.0.0.1:9") as process:
            assert process.stderr is not None
            async for line in process.stderr:
                if b"waiting for the run" in line:
                    break
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(STOP_S):
                assert await process.wait() == 0

    bounded(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": "chess"}, "replaybuf: environment is 'chess'; installed: "),
        ({"group-size": "8"}, "replaybuf: group_size is 8; the run's group_size is 4"),
        ({"max-tokens": "63"}, "has 66; the engine's max_model_len is 64; --prompt-filter '{\"max_tokens\": 1}' drops"),
        ({"prompt-filter": '{"max_tokens": 2}'}, "the filters drop all 6 prompts of prompts"),
        ({"length-penalty": '{"cache_tokens": 9}'}, "replaybuf: cache_tokens is 9; the maximum is 8"),
        ({"max-tokens": "0"}, 'Invalid value "0" for --max-tokens. Must be > 0.'),
        ({"logprob-options": '{"ref": {"micro_batch": 0}}'}, "Expected `int` >= 1 - at `$.ref.micro_batch`"),
        ({"ref-micro-batch": "2"}, "Unknown option: --ref-micro-batch"),
        (
            {"environment": "tests.generator.turn_environments:Echo", "reward-processes": "1"},
            "replaybuf: environment 'Echo' plays turns; it must be the only one, without weight and reward processes",
        ),
    ],
)
def test_an_invalid_option_ends_it_at_once_with_one_message(
    tmp_path: Path, run: RunClient, options: dict[str, str], message: str
) -> None:
    put(run)

    async def main() -> None:
        async with (
            EngineDouble().up() as engine,
            generator(tmp_path, _url(run), run.run, engine.url, **options) as process,
        ):
            _, error = await process.communicate()
            assert process.returncode
            assert message in " ".join(error.decode().splitlines()[-3:])

    bounded(main())


def _url(run: RunClient) -> str:
    return str(run.http.base_url)
