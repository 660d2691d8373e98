"""`replaybuf stage` as a process: it adds a column to stored groups, and no end of it loses or repeats anything."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, group
from tests.forked import ForkedProcess, run_forked
from tests.service.test_late_columns import REQUIRED, start
from tests.valkeys import Valkey
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
WITHIN_S = 60.0
FUNCTIONS = """
import os, time
from pathlib import Path

def ref(group):
    return [[-float(token) for token in rollout.completion_ids] for rollout in group.rollouts]

def judge(group):
    return [float(len(rollout.completion_ids)) + number for number, rollout in enumerate(group.rollouts)]

def short(group):
    return [[-1.0] for rollout in group.rollouts]

def raises(group):
    raise RuntimeError("the model is gone")

def hangs(group):
    Path("hanging").touch()
    time.sleep(3600)

def third_hangs(group):
    if group.group_id == "c":
        hangs(group)
    return ref(group)
"""


class Stages:
    """Starts stages in a folder with `FUNCTIONS`, and kills those that are left."""

    def __init__(self, folder: Path, url: str, run: str) -> None:
        self.folder = folder
        self._url = url
        self._run = run
        self._started: list[ForkedProcess] = []
        (folder / "functions.py").write_text(FUNCTIONS)

    def start(self, function: str, column: str = "ref_logprobs") -> ForkedProcess:
        """Start one stage."""
        self._started.append(
            ForkedProcess(
                "replaybuf",
                ["stage", self._run, "--column", column, "--function", f"functions:{function}", "--url", self._url],
                os.environ,
                None,
                folder=self.folder,
            )
        )
        return self._started[-1]

    def end(self) -> None:
        """Kill the stages."""
        for process in self._started:
            process.kill()
            process.communicate(WITHIN_S)


@pytest.fixture
def stages(tmp_path: Path, service: ServeProcess, run: RunClient) -> Iterator[Stages]:
    """Stages for the test's run."""
    made = Stages(tmp_path, service.url, run.run)
    yield made
    made.end()


def lacking(run: RunClient, column: str = "ref_logprobs") -> list[str]:
    return [group["group_id"] for group in run.get("groups", lacks=column).json()["groups"]]


def records(run: RunClient) -> list[dict[str, Any]]:
    return [record for record in run.get("ledger", limit=1000).json()["records"] if record["type"] == "COLUMNS"]


def stop(process: ForkedProcess) -> str:
    """End a stage with SIGTERM; return what it printed."""
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(WITHIN_S)
    assert process.returncode == 0, error
    return out


def test_a_stage_completes_groups_until_the_run_is_finished(run: RunClient, stages: Stages) -> None:
    epoch = start(run, "a", "b", strategy=REQUIRED, max_steps=3)
    stage = stages.start("ref")
    body = read_batch(run.batch(0, epoch, wait_ms=25_000).content)
    assert body.micro_batches[0].ref_logprobs is not None
    assert body.micro_batches[0].ref_logprobs.tolist() == [0, 0, -3, -3, -3, 0, 0, -4, -4, -4]
    run.append(group("c"))
    for step in range(3):
        assert run.batch(step, epoch, wait_ms=25_000).status_code == 200
        run.ack(step, epoch)
        run.publish(step + 1, epoch)
    out, error = stage.communicate(WITHIN_S)
    assert stage.returncode == 0 and "added 3, passed 0, failed 0" in out, error


def test_a_stage_of_rewards_changes_advantages(run: RunClient, stages: Stages) -> None:
    start(run, "a", advantage="dr-grpo")
    stages.start("judge", "rewards")
    eventually(lambda: lacking(run, "rewards") == [], WITHIN_S)
    rollouts = run.get("groups/a").json()["rollouts"]
    assert [(rollout["reward"], rollout["advantage"]) for rollout in rollouts] == [(3.0, -0.5), (4.0, 0.5)]


def test_a_killed_stage_loses_nothing_and_the_next_one_continues(run: RunClient, stages: Stages) -> None:
    start(run, "a", "b", "c", "d")
    first = stages.start("third_hangs")
    eventually(lambda: (stages.folder / "hanging").exists(), WITHIN_S)
    first.kill()
    assert "c" in lacking(run)
    second = stages.start("ref")
    eventually(lambda: lacking(run) == [], WITHIN_S)
    stop(second)
    numbers = [added["number"] for record in records(run) for added in record["groups"]]
    assert sorted(numbers) == [1, 2, 3, 4]


def test_several_stages_of_one_column_are_harmless(run: RunClient, stages: Stages) -> None:
    names = [f"g{number}" for number in range(40)]
    start(run, *names)
    several = [stages.start("ref") for _ in range(3)]
    for process in several:  # a process that has not begun yet would die by the signal
        assert process.stdout is not None and process.stdout.readline().startswith("stage adds")
    eventually(lambda: lacking(run) == [], WITHIN_S)
    added = [int(re.search(r"added (\d+), passed \d+, failed 0", stop(process))[1]) for process in several]  # type: ignore[index]
    assert 40 - len(several) <= sum(added) <= 40  # an answer on its way is not counted after the signal
    assert sorted(group["number"] for record in records(run) for group in record["groups"]) == list(range(1, 41))


@pytest.mark.parametrize("function", ["raises", "short"])
def test_a_function_that_fails_is_tried_three_times_per_group(function: str, run: RunClient, stages: Stages) -> None:
    start(run, "a", "b")
    stage = stages.start(function)
    run.append(group("c"))
    tries: list[str] = []
    assert stage.stderr is not None
    for line in stage.stderr:
        tries += re.findall(r"failed column=ref_logprobs group=(\w) try=\d", line)
        if len(tries) == 9:
            break
    assert sorted(tries) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert sorted(lacking(run)) == ["a", "b", "c"] and records(run) == []
    assert "failed 9" in stop(stage)


def test_sigterm_ends_a_stage_whose_function_hangs(run: RunClient, stages: Stages) -> None:
    start(run, "a")
    stage = stages.start("hangs")
    eventually(lambda: (stages.folder / "hanging").exists(), WITHIN_S)
    assert "added 0, passed 0, failed 0" in stop(stage)


def test_a_stage_continues_with_the_next_leader(tmp_path: Path, connect: Connect) -> None:
    """kill -9 of the leader: the stage waits for the standby, and completes what it stores."""
    with Valkey(tmp_path / "valkey") as valkey:
        servers = [
            ServeProcess(tmp_path / name, "--redis-url", valkey.url, "--no-balance").start() for name in ("one", "two")
        ]
        stages = Stages(tmp_path, ",".join(server.url for server in servers), "r")
        try:
            run, behind = (connect(server.url, "r") for server in servers)
            start(run, "a")
            stage = stages.start("ref")
            eventually(lambda: lacking(run) == [], WITHIN_S)
            servers[0].kill()
            eventually(lambda: behind.post("groups", **group("b")).status_code == 200, WITHIN_S)
            eventually(lambda: lacking(behind) == [], WITHIN_S)
            assert "failed 0" in stop(stage)  # the answer for b may be under way when the stage ends
        finally:
            stages.end()
            for server in servers:
                server.end()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--column", "nothing", "--function", "functions:ref"), "valid: ref_logprobs"),
        (("--column", "rewards"), "set one of function and model"),
        (("--column", "rewards", "--function", "nowhere:ref"), "does not import"),
        (("--column", "rewards", "--function", "functions:judge"), "does not exist"),
    ],
)
def test_wrong_options_are_one_clear_message(
    options: tuple[str, ...], word: str, service: ServeProcess, tmp_path: Path
) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    command = ["stage", "nobody", *options, "--url", service.url]
    ended = run_forked("replaybuf", command, timeout_s=WITHIN_S, folder=tmp_path)
    assert ended.returncode == 1 and word in ended.stderr and "Traceback" not in ended.stderr


def test_a_stage_that_ends_with_an_error_reports_its_traceback(stages: Stages, run: RunClient) -> None:
    """Under a name with the column; a stage that is stopped reports nothing."""
    start(run)
    assert stages.start("missing", "rewards").wait(WITHIN_S) == 1
    (known,) = run.get("producers").json()["producers"]
    assert known["name"].startswith("stage-rewards-") and known["failure"]["reason"] == "producer_fault"
    assert "Traceback" in known["failure"]["traceback"] and "missing" in known["failure"]["traceback"]
    waiting = stages.start("ref")
    assert waiting.stdout is not None and waiting.stdout.readline().startswith("stage adds")
    stop(waiting)
    assert len(run.get("producers").json()["producers"]) == 1
