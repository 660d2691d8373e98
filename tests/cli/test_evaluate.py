"""`replaybuf eval` as a process: it scores held-out prompts, prints the result, and records it in a run."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from tests.cli.test_generate import bounded, write_prompts
from tests.conftest import RunClient
from tests.forked import run_forked
from tests.generator.doubles import EngineDouble, write_tokenizer


async def evaluated(folder: Path, engine: str, *options: str, environment: str = "exact-match") -> tuple[int, str, str]:
    """Run `replaybuf eval`; return exit code, standard output and standard error."""
    arguments = (
        *("eval", "--engine", engine, "--environment", environment),
        *("--tokenizer", str(write_tokenizer(folder / "model")), "--max-tokens", "8"),
        *(options if "--prompts" in options else ("--prompts", str(write_prompts(folder)), *options)),
    )
    ended = await asyncio.to_thread(run_forked, "replaybuf", arguments, os.environ, 60.0)
    return ended.returncode, ended.stdout, ended.stderr


def test_it_prints_json_and_the_run_records_the_result(tmp_path: Path, run: RunClient) -> None:
    assert run.put(batch={"groups_per_batch": 1}).status_code == 201
    run.reach_version(2)
    before = run.state()

    async def main() -> None:
        async with EngineDouble(version=2).up() as engine:
            keep = (run.run, "--url", str(run.http.base_url))
            code, out, error = await evaluated(tmp_path, engine.url, *keep, "--json", "--samples", "2")
        assert code == 0, error
        printed = json.loads(out)
        assert (printed["name"], printed["version"], printed["reward_mean"], printed["standard_error"]) == (
            "words",
            2,
            1.0,
            0.0,
        )
        assert (printed["rollouts"], printed["samples"], printed["failed"], printed["generation"]) == (12, 2, 0, 0)
        assert run.get("evaluations").json() == {"evaluations": [printed]}
        assert {(request["n"], request["temperature"]) for request in engine.requests} == {(1, 0.0)}

    bounded(main())
    after = run.state()
    assert (after["groups"], after["tickets"]) == (before["groups"], before["tickets"])


def test_a_result_that_the_run_refuses_is_printed_all_the_same(tmp_path: Path, run: RunClient) -> None:
    """The engine serves a version that the run has not trained."""
    assert run.put(batch={"groups_per_batch": 1}).status_code == 201

    async def main() -> None:
        async with EngineDouble(version=7).up() as engine:
            keep = (run.run, "--url", str(run.http.base_url))
            code, out, error = await evaluated(tmp_path, engine.url, *keep, "--json")
        assert (code, json.loads(out)["version"]) == (1, 7)
        assert "version is 7; the trainer has reached 0" in error

    bounded(main())


def test_it_prints_a_table_and_needs_no_service(tmp_path: Path) -> None:
    async def main() -> None:
        async with EngineDouble(version=7).up() as engine:
            code, out, error = await evaluated(tmp_path, engine.url)
        assert code == 0, error
        assert "1.0000 ± 0.0000" in out and "6, 1 per prompt at temperature 0" in out

    bounded(main())


def test_an_environment_with_turns_is_played(tmp_path: Path) -> None:
    """It takes two turns, or one with --max-turns 1; the reward is the episode's."""
    echo = "tests.generator.turn_environments:Echo"

    async def main() -> None:
        async with EngineDouble(version=7).up() as engine:
            for options, requests in (((), 12), (("--max-turns", "1"), 6)):
                engine.requests.clear()
                code, out, error = await evaluated(tmp_path, engine.url, "--json", *options, environment=echo)
                assert code == 0, error
                assert (json.loads(out)["reward_mean"], len(engine.requests)) == (0.5, requests)

    bounded(main())


def test_an_invalid_option_of_eval_ends_it_with_one_message(tmp_path: Path) -> None:
    async def main() -> None:
        async with EngineDouble().up() as engine:
            for options, said in (
                (("--samples", "0"), 'Invalid value "0" for --samples'),
                (("r",), "url and run belong together"),
                (("--prompts", "reasoning-gym:chain_sum"), "an evaluation needs a finite set"),
            ):
                code, _, error = await evaluated(tmp_path, engine.url, *options)
                assert code
                assert said in " ".join(error.splitlines()[-3:])

    bounded(main())
