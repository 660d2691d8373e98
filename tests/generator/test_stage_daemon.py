"""A stage waits for a service that cannot work now, whatever the reason, and ends with its run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from replaybuf.client.client import Client
from replaybuf.errors import DataLost, NoRoom, NotLeader, ReplaybufError, ServiceUnavailable
from replaybuf.generator.stage import stage_daemon
from replaybuf.generator.stage.stage_daemon import StageDaemon


class TroubledClient:
    """A client of one group; its next call fails with `error` once."""

    def __init__(self, call: str, error: ReplaybufError) -> None:
        self._call, self._error = call, [error]
        self.columns: list[str] = []

    def _may_fail(self, call: str) -> None:
        if call == self._call and self._error:
            raise self._error.pop()

    def list_groups(self, **_: Any) -> Any:
        self._may_fail("list_groups")
        return SimpleNamespace(groups=[SimpleNamespace(group_id="g")] if not self.columns else [], next=None)

    def get_group(self, group_id: str) -> Any:
        self._may_fail("get_group")
        return SimpleNamespace(rollouts=[group_id])

    def add_columns(self, _: str, columns: dict[str, Any]) -> int:
        self._may_fail("add_columns")
        self.columns += columns
        return 1

    def get_run(self) -> Any:
        self._may_fail("get_run")
        return SimpleNamespace(state="finished")


@pytest.mark.parametrize("call", ["list_groups", "get_group", "add_columns", "get_run"])
@pytest.mark.parametrize("error", [ServiceUnavailable("away"), NotLeader("other"), NoRoom("full"), DataLost("older")])
def test_a_stage_goes_on_when_the_service_can_work_again(
    call: str, error: ReplaybufError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_daemon, "AWAY_PAUSE_S", 0.0)
    monkeypatch.setattr(stage_daemon, "POLL_S", 0.0)
    client = TroubledClient(call, error)
    StageDaemon(cast(Client, client), "ref_logprobs", lambda _: [[-1.0]], threading.Event()).run()
    assert client.columns == ["ref_logprobs"]
