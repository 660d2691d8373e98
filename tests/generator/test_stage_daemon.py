"""A stage works in batches over groups, tries what fails a bounded number of times, and ends with its run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from replaybuf.client.client import AsyncClient
from replaybuf.errors import DataLost, NoRoom, NotLeader, ReplaybufError, ServiceUnavailable
from replaybuf.generator.stage import stage_daemon
from replaybuf.generator.stage.local import LocalStage
from replaybuf.generator.stage.stage_daemon import MOST_TRIES, StageDaemon
from replaybuf.generator.stage.stages import Rollout
from tests.generator.doubles import TIMEOUT_S

ROLLOUT = SimpleNamespace(prompt_ids=[1], completion_ids=[2, 3], completion_mask=None)


class FakeClient:
    """A client of a run with `groups`, each of so many rollouts; the next `call` fails with `error` once.

    The run is finished when `get_run` has been called often enough for every try.
    """

    def __init__(self, groups: dict[str, int], call: str = "", error: ReplaybufError | None = None) -> None:
        self.groups = groups
        self.columns: dict[str, Any] = {}
        self.reported: list[str] = []
        self._looks = 0
        self._call, self._errors = call, [] if error is None else [error]

    def _may_fail(self, call: str) -> None:
        if call == self._call and self._errors:
            raise self._errors.pop()

    async def list_groups(self, **_: Any) -> Any:
        self._may_fail("list_groups")
        lacking = [name for name in self.groups if name not in self.columns]
        return SimpleNamespace(groups=[SimpleNamespace(group_id=name) for name in lacking], next=None)

    async def get_group(self, group_id: str) -> Any:
        self._may_fail("get_group")
        return SimpleNamespace(group_id=group_id, rollouts=[ROLLOUT] * self.groups[group_id])

    async def add_columns(self, group_id: str, columns: dict[str, Any]) -> int:
        self._may_fail("add_columns")
        ((_, values),) = columns.items()
        self.columns[group_id] = [value.tolist() for value in values]
        return 1

    async def get_run(self) -> Any:
        self._may_fail("get_run")
        self._looks += 1
        return SimpleNamespace(state="finished" if self._looks > MOST_TRIES else "running")

    async def send_heartbeat(self, producer: str, *, failure: Any) -> None:
        self.reported.append(f"{producer}: {failure.traceback}")


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_daemon, "AWAY_PAUSE_S", 0.0)
    monkeypatch.setattr(stage_daemon, "POLL_S", 0.0)


def work(
    client: FakeClient,
    call: Callable[[Sequence[Rollout]], Any],
    micro_batch: int | None = None,
    column: str = "ref_logprobs",
    timeout_s: float = TIMEOUT_S,
) -> StageDaemon:
    """Run a stage until the run is finished and nothing is left that may be tried."""

    async def main() -> StageDaemon:
        stage = LocalStage(column, "function", call, micro_batch, timeout_s)
        daemon = StageDaemon(cast(AsyncClient, client), stage, "stage")
        async with asyncio.timeout(TIMEOUT_S):
            await daemon.run()
        return daemon

    return asyncio.run(main())


@pytest.mark.parametrize("call", ["list_groups", "get_group", "add_columns", "get_run"])
@pytest.mark.parametrize("error", [ServiceUnavailable("away"), NotLeader("other"), NoRoom("full"), DataLost("older")])
def test_a_stage_goes_on_when_the_service_can_work_again(call: str, error: ReplaybufError) -> None:
    client = FakeClient({"g": 1}, call, error)
    work(client, lambda _: [[-1.0, -2.0]])
    assert client.columns == {"g": [[-1.0, -2.0]]}


def test_micro_batches_go_over_groups_and_the_rest_follows_when_no_group_comes() -> None:
    sizes: list[int] = []

    def logprobs(rollouts: Sequence[Rollout]) -> list[list[float]]:
        sizes.append(len(rollouts))
        return [[-1.0, -2.0]] * len(rollouts)

    client = FakeClient({f"g{number}": 2 for number in range(5)})
    daemon = work(client, logprobs, micro_batch=4)
    assert sizes == [4, 4, 2] and daemon.added == 5
    assert list(client.columns.values()) == [[[-1.0, -2.0]] * 2] * 5


@pytest.mark.parametrize(
    ("column", "values", "stored"),
    [
        ("rewards", [1, 0.1], [1.0, 0.1]),
        ("rewards", (number for number in (1, 2)), [1.0, 2.0]),
        ("ref_logprobs", [(-1, -2), (-3, -4)], [[-1.0, -2.0], [-3.0, -4.0]]),
    ],
)
def test_a_function_returns_numbers_or_lists_per_rollout(column: str, values: Any, stored: list[Any]) -> None:
    client = FakeClient({"g": 2})
    work(client, lambda _: values, column=column)
    assert client.columns == {"g": stored}


@pytest.mark.parametrize("values", [None, 1.0, [1.0], [[1.0], [2.0]], ["a", "b"]])
def test_what_fails_is_tried_three_times_and_then_reported(values: Any) -> None:
    client = FakeClient({"g": 2, "h": 2})
    daemon = work(client, lambda _: values, column="rewards")
    assert (daemon.failed, daemon.given_up, client.columns) == (2 * MOST_TRIES, 2, {})
    assert [report.startswith("stage: ") for report in client.reported] == [True, True]
    assert all(any(f"gave up rewards of group {name}" in report for report in client.reported) for name in "gh")


def test_a_group_that_fails_costs_the_groups_beside_it_one_try() -> None:
    client = FakeClient({"good": 1, "bad": 2, "fine": 1})

    def logprobs(rollouts: Sequence[Rollout]) -> list[list[float]]:
        if any(rollout.group is not None and rollout.group.group_id == "bad" for rollout in rollouts):
            raise ValueError("too long")
        return [[-1.0, -2.0]] * len(rollouts)

    daemon = work(client, logprobs, micro_batch=4)
    assert sorted(client.columns) == ["fine", "good"] and daemon.given_up == 1
    assert daemon.failed == 2 + MOST_TRIES
    (report,) = client.reported
    assert "ValueError: too long" in report, "the traceback of the user's code"


def test_a_call_that_hangs_ends_the_stage() -> None:
    hanging = threading.Event()
    with pytest.raises(BaseExceptionGroup) as caught:
        work(FakeClient({"g": 1}), lambda _: hanging.wait(TIMEOUT_S), timeout_s=0.05)
    hanging.set()
    assert "did not finish within 0.05 s" in str(caught.value.exceptions[0])
