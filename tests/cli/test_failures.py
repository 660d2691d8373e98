"""A producer that fails: its traceback reaches API, command line and trainer, and no secret does."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.cli.test_generate import _url, bounded, generator, put
from tests.cli.test_main import replaybuf
from tests.conftest import RunClient
from tests.generator.doubles import EngineDouble
from tests.waiting import until

SECRET = "hunter2!'\"ö/=%"
REWARD = "tests.generator.reward_functions:leaking"


def test_the_traceback_of_a_reward_reaches_everybody_who_waits_and_its_secret_nobody(
    tmp_path: Path, run: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reward runs in the generator, the other in a process of its own."""
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    put(run, tickets={"max_attempts": 1})
    epoch, folders = run.attach(), [tmp_path / name for name in ("gen-0", "gen-1")]
    for folder in folders:
        folder.mkdir()

    def reported() -> bool:
        known = run.get("producers").json()["producers"]
        return (
            len(known) == 2
            and all(producer["failure"] for producer in known)
            and run.get("failed-prompts").json()["failed"]
        )

    def start(processes: int, engine: str) -> AbstractAsyncContextManager[object]:
        options = {"environment": REWARD, "reward-processes": str(processes), "producer": f"gen-{processes}"}
        return generator(folders[processes], _url(run), run.run, engine, **options)

    async def main() -> None:
        async with EngineDouble().up() as engine, start(0, engine.url), start(1, engine.url):
            await until(reported, 60.0)

    bounded(main())
    failures = {producer["name"]: producer["failure"] for producer in run.get("producers").json()["producers"]}
    for failure in failures.values():
        assert (failure["reason"], failure["lasts"]) == ("reward_raised", True)
        assert 'reward_functions.py", line' in failure["traceback"] and "in leaking" in failure["traceback"]
        assert "ValueError: the judge refused $JUDGE_KEY, $JUDGE_KEY, " in failure["traceback"]

    waits = run.batch(0, epoch).json()
    assert " fails, " in waits["detail"] and "the judge refused $JUDGE_KEY" in waits["detail"]
    assert "\n" not in waits["detail"]

    shown, listed, status = (
        replaybuf(*words, "--url", _url(run), COLUMNS="500").stdout
        for words in (
            ("groups", "failures", run.run),
            ("groups", "failures", run.run, "--json"),
            ("status", run.run),
        )
    )
    assert {name: failure["traceback"] for name, failure in json.loads(listed).items()} == {
        name: failure["traceback"] for name, failure in failures.items()
    }
    assert all(name in shown for name in failures) and shown.count("in leaking") == 2
    assert " fails, " in status and "the judge refused $JUDGE_KEY" in status
    pages = [run.get(page).text for page in ("producers", "failed-prompts", "ledger", "flow")]
    pages += [run.http.get("/v1/overview").text, json.dumps(run.state()), json.dumps(waits)]
    assert not [text for text in (*pages, shown, listed, status) if "hunter2" in text]


def test_a_generator_that_ends_before_its_first_heartbeat_reports_its_traceback(
    tmp_path: Path, run: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot load its environment; the secret in the error is not sent."""
    monkeypatch.setenv("JUDGE_MODULE", "nowhere_4711")
    put(run)

    async def main() -> None:
        options = {"environment": "nowhere_4711:reward", "producer": "gen-0"}
        async with (
            EngineDouble().up() as engine,
            generator(tmp_path, _url(run), run.run, engine.url, **options) as process,
        ):
            assert await process.wait() == 1

    bounded(main())
    (known,) = run.get("producers").json()["producers"]
    assert known["name"] == "gen-0" and known["failure"]["reason"] == "producer_fault"
    assert "Traceback" in known["failure"]["traceback"] and "$JUDGE_MODULE" in known["failure"]["traceback"]
    assert "nowhere_4711" not in known["failure"]["traceback"]


def test_a_process_that_ends_while_the_service_is_away_names_its_own_error(tmp_path: Path) -> None:
    """The report that cannot be sent is one line of the log."""

    async def main() -> None:
        options = {"environment": "nowhere_4711:reward"}
        async with generator(tmp_path, "http://127.0.0.1:9", "r", "http://127.0.0.1:9", **options) as process:
            _, log = await process.communicate()
            assert process.returncode == 1
            assert b"the service did not take the traceback" in log
            assert b"nowhere_4711" in log.splitlines()[-1]

    bounded(main())
