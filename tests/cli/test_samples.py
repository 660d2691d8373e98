"""`replaybuf groups samples` and `groups show`: rollouts that stay readable after their groups are freed."""

from __future__ import annotations

from tests.cli.test_runs import Terminal as Terminal
from tests.cli.test_runs import terminal as terminal
from tests.conftest import RunClient, group
from tests.waiting import eventually


def test_samples_are_shown_newest_step_first_and_with_their_freed_group(run: RunClient, terminal: Terminal) -> None:
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    assert "0 steps with samples, 4 of each" in terminal("groups", "samples", run.run)
    for step in range(2):
        run.append(group(f"g{step}", step, metadata={"answer": "7"}))
        run.train(epoch, range(step, step + 1))
    run.post("checkpoints", epoch=epoch, step=2, keep=1)
    eventually(lambda: run.get("groups/g1").json()["rollouts"] is None, within_s=60.0)
    shown = terminal("groups", "samples", run.run, "--limit", "1")
    assert "step 1, best, group g1: reward 1" in shown and "4 4 4" in shown and "more: --before 1" in shown
    assert terminal.json("groups", "samples", run.run, "--step", 0)["samples"][0]["group_id"] == "g0"
    assert "step 0, worst, group g0: reward 0" in terminal("groups", "show", run.run, "g0")
    assert "nothing to show" in terminal("groups", "samples", run.run, "--contains", "words")
    assert "g1" in terminal("groups", "list", run.run, "--id-prefix", "test/g1")
