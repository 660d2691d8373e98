"""Plug-ins of a running service: filters that drop, priorities that are learnt, and plug-ins that misbehave."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from replaybuf.wire.batch import read_batch
from tests.conftest import RunClient, ServeProcess, group
from tests.plugin_site import write_plugins
from tests.waiting import eventually

Connect = Callable[[str, str], RunClient]
MODULE = '''
import sys
import time

import msgspec
import numpy as np
from replaybuf.kernel.strategy.contract import Evictions, Filter, Selection, Strategy, StrategyOptions, Waiting, fill


class Best(Strategy[StrategyOptions]):
    """Takes the group of the highest priority; any number of times."""

    max_staleness = max_uses = None
    look_ahead = 0

    def select(self, groups, buffer, budget, rng):
        return fill(groups, np.argsort(-groups.priority, kind="stable"), budget)


class Raises(Best):
    def select(self, groups, buffer, budget, rng):
        raise KeyError("no such thing")


class Hangs(Best):
    def select(self, groups, buffer, budget, rng):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue  # what is raised in here is nobody else's


class Invents(Best):
    def select(self, groups, buffer, budget, rng):
        return Selection(np.array([4711]))


class Forges(Best):
    max_uses = 1

    def select(self, groups, buffer, budget, rng):
        groups.__dict__["row"] = np.array([1] * len(groups))
        return Selection(np.array([1]))


class Exits(Best):
    def select(self, groups, buffer, budget, rng):
        sys.exit("select")


class Unbegun(Best):
    def __init__(self, options):
        sys.exit("no")


class SlowBuilt(Best):
    def __init__(self, options):
        super().__init__(options)
        time.sleep(60)


class SlowChecked(Best):
    def check(self, budget, steps_per_publish, max_tokens_live):
        time.sleep(60)


class SlowPromise(Best):
    @property
    def look_ahead(self):
        time.sleep(60)
        return 0


class Fickle(Best):
    read = 0

    @property
    def look_ahead(self):
        self.read += 1
        if self.read > 1:
            raise ZeroDivisionError
        return 0


class Indebted(Best):
    def admit(self, buffer, flow):
        return -1


class Lavish(Best):
    def admit(self, buffer, flow):
        return "all of them"


class Boundless(Best):
    max_staleness = -3


class Refuses(Best):
    def admit(self, buffer, flow):
        raise OSError("closed")


class Overhears(Best):
    def observe(self, feedback):
        raise ValueError("what?")


class Learner(Best):
    """Selects the newest or the oldest groups first, as the last feedback says."""

    newest = False

    def observe(self, feedback):
        self.newest = feedback.values.get("newest", self.newest)

    def select(self, groups, buffer, budget, rng):
        order = np.arange(len(groups))
        return fill(groups, order[::-1] if self.newest else order, budget)


class FirstRelease(Best):
    """As plug-ins were written for the first release: options of any struct, and no attribute that came later."""

    class Options(msgspec.Struct, frozen=True):
        newest: bool = False

    def __init__(self, options):
        self.newest = options.newest

    def select(self, groups, buffer, budget, rng):
        order = np.arange(len(groups))
        return fill(groups, order[::-1] if self.newest else order, budget)


class FirstFilter(Filter):
    class Options(msgspec.Struct, frozen=True):
        most: int = 1000

    def drop(self, groups, buffer):
        rows = groups.row[groups.tokens > self.options.most]
        return Evictions(rows, ["long"] * len(rows))


class Odd(Filter[StrategyOptions]):
    def drop(self, groups, buffer):
        rows = groups.row[groups.prompt_index % 2 == 1]
        return Evictions(tuple(rows.tolist()), ("odd",) * len(rows))


class Poor(Filter[StrategyOptions]):
    def drop(self, groups, buffer):
        rows = groups.row[groups.reward_std == 0]
        return Evictions(tuple(rows.tolist()), ("poor",) * len(rows))


class Quits(Filter[StrategyOptions]):
    def drop(self, groups, buffer):
        sys.exit("drop")


class Mute(Filter[StrategyOptions]):
    def drop(self, groups, buffer):
        return Evictions(tuple(groups.row.tolist()), ())
'''
STRATEGIES = tuple(re.findall(r"^class (\w+)\((?:Best|Strategy)", MODULE, re.MULTILINE))
FILTERS = tuple(re.findall(r"^class (\w+)\(Filter", MODULE, re.MULTILINE))


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service with a distribution of test plug-ins beside it."""
    site = tmp_path_factory.mktemp("site")
    kinds = {"replaybuf.strategies": STRATEGIES, "replaybuf.filters": FILTERS}
    classes = {kind: {name.lower(): name for name in names} for kind, names in kinds.items()}
    write_plugins(site, "odd_plugins", MODULE, classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        server = ServeProcess(tmp_path_factory.mktemp("plugged") / "data").start()
        yield server
        server.end()


def ids(body: bytes) -> list[str]:
    """Name the groups of a batch."""
    return list(read_batch(body).meta.group_ids)


def rewarded(group_id: str, *rewards: float) -> dict[str, Any]:
    """Build a group with these rewards."""
    made = group(group_id, rollouts=len(rewards))
    for rollout, reward in zip(made["rollouts"], rewards, strict=True):
        rollout["reward"] = reward
    return made


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", r"strategy 'raises' raised in select: KeyError\('no such thing'\)"),
        (
            "hangs",
            r"strategy 'hangs' in select: did not .* within 1 s; called again, it did not .* within 0.5 s",
        ),
        ("exits", r"strategy 'exits' raised in select: SystemExit\('select'\)"),
        ("invents", r"strategy 'invents' broke the rule 'selects only groups that are stored' at step 0: \[4711\]"),
    ],
)
def test_a_strategy_that_breaks_its_contract_pauses_its_run_alone(
    plugged: ServeProcess, connect: Connect, name: str, reason: str
) -> None:
    """The run says what its plug-in did and wants an operator; another run, and the service, go on.

    One broken rule stands for all, which are in tests/kernel/test_answer_checks.py.

    A call that hangs holds the loop for 1.5 s. On a busy machine the leases of 3 s may end meanwhile; then the service
    answers 503 until it leads again.
    """
    broken, sound = connect(plugged.url, f"run-{name}"), connect(plugged.url, f"beside-{name}")
    for run, strategy in ((broken, name), (sound, "on-policy")):
        assert run.put(batch={"groups_per_batch": 1}, strategy={"name": strategy}).status_code == 201
        run.append(group("a"), group("aa"))
    started_s = time.monotonic()
    waiting = broken.batch(0, broken.attach())
    assert time.monotonic() - started_s < 25, "the limit is 1.5 s, and one plug-in hangs for ever"
    assert (waiting.status_code, waiting.json()["reason"], waiting.json()["blocked_on"]) == (202, "paused", "operator")
    state = broken.state()
    assert state["state"] == "paused"
    assert re.fullmatch(reason, state["paused_reason"])
    eventually(lambda: broken.post("groups", groups=[group("b")]).status_code == 200, within_s=30.0)
    eventually(lambda: sound.post("attach", resume_step=0, dp_world_size=1).status_code == 200, within_s=30.0)
    assert ids(sound.batch(0, sound.attach()).content) == ["a"]
    assert httpx.get(f"{plugged.url}/readyz").status_code == 200
    assert broken.http.patch(broken.path, json={"strategy": {"name": "best"}, "state": "running"}).status_code == 200
    assert broken.batch(0, broken.attach()).status_code == 200


def test_a_strategy_that_changes_its_view_cannot_select_a_forbidden_group(
    plugged: ServeProcess, connect: Connect
) -> None:
    """The answer is held to the core's own columns, by the bound it breaks."""
    run = connect(plugged.url, "run-forges")
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "forges"})
    run.append(group("a"), group("b"))
    epoch = run.attach()
    run.train(epoch, range(1))
    assert run.batch(1, epoch).json()["reason"] == "paused"
    assert "strategy 'forges' broke the rule 'keeps the max_uses of 1' at step 1: [1]" in run.state()["paused_reason"]


@pytest.mark.parametrize(
    ("name", "reported"),
    [("slowbuilt", "did not return"), ("slowchecked", "did not"), ("slowpromise", "did not")],
)
def test_a_slow_strategy_constructor_is_rejected_in_time(
    plugged: ServeProcess, connect: Connect, name: str, reported: str
) -> None:
    """Building, properties and check are bounded as answers are."""
    started_s = time.monotonic()
    answer = connect(plugged.url, f"run-{name}").put(batch={"groups_per_batch": 1}, strategy={"name": name})
    assert time.monotonic() - started_s < 25, "the limit is 1 s, the plug-in takes 60 s"
    assert (answer.status_code, answer.json()["name"]) == (422, name)
    assert f"plug-in '{name}', when it was configured, {reported}" in answer.json()["detail"]


def test_the_properties_of_a_strategy_are_read_once(plugged: ServeProcess, connect: Connect) -> None:
    """A property that raises later is asked no more."""
    run = connect(plugged.url, "run-fickle")
    assert run.put(batch={"groups_per_batch": 1}, strategy={"name": "fickle"}).status_code == 201
    run.append(group("a"), group("b"))
    epoch = run.attach()
    assert ids(run.batch(0, epoch).content) == ["a"]
    run.train(epoch, range(1))
    assert run.state()["state"] == "running"
    assert httpx.get(f"{plugged.url}/metrics").status_code == httpx.get(f"{plugged.url}/v1/runs").status_code == 200


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("refuses", "OSError('closed')"),
        ("indebted", "broke the rule 'admits a whole number of groups, 0 or more' at step 0: -1"),
        ("lavish", "broke the rule 'admits a whole number of groups, 0 or more' at step 0: 'all of them'"),
    ],
)
def test_a_failing_admission_pauses_the_run(plugged: ServeProcess, connect: Connect, name: str, reported: str) -> None:
    """The producer waits for the operator; the service reports no fault of its own."""
    run = connect(plugged.url, f"run-{name}")
    run.put(batch={"groups_per_batch": 1}, strategy={"name": name})
    answer = run.post("tickets", producer="p", count=1)
    assert (answer.status_code, answer.json()["waiting"]["reason"]) == (200, "paused")
    assert reported in run.state()["paused_reason"]


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("unbegun", "plug-in 'unbegun' raised SystemExit('no') when it was configured"),
        ("boundless", "max_staleness of strategy 'boundless' is -3; it must be a whole number >= 0 or None"),
    ],
)
def test_a_strategy_that_does_not_build_or_has_invalid_bounds_is_rejected(
    plugged: ServeProcess, connect: Connect, name: str, reported: str
) -> None:
    answer = connect(plugged.url, f"run-{name}").put(batch={}, strategy={"name": name})
    assert (answer.status_code, answer.json()["detail"]) == (422, reported)


def test_an_observation_that_raises_acks_the_step_and_pauses_the_run(plugged: ServeProcess, connect: Connect) -> None:
    run = connect(plugged.url, "run-overhears")
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "overhears"})
    run.append(group("a"))
    epoch = run.attach()
    run.batch(0, epoch)
    assert run.ack(0, epoch, feedback={"loss": 1.0}).status_code == 200
    assert (run.state()["step"], run.state()["state"]) == (1, "paused")


def test_observed_feedback_survives_a_restart_a_change_and_a_rewind(plugged: ServeProcess, connect: Connect) -> None:
    """The same ledger gives the same selection; feedback of a step that was given back is not part of it."""
    run = connect(plugged.url, "run-learner")
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "learner"})
    run.append(group("a"), group("b"), group("c"))
    epoch = run.attach()
    assert ids(run.batch(0, epoch).content) == ["a"]
    run.ack(0, epoch, feedback={"newest": True})
    run.publish(1, epoch)
    plugged.kill()
    plugged.start()
    run = connect(plugged.url, "run-learner")
    assert ids(run.batch(1, epoch).content) == ["c"]
    run.ack(1, epoch, feedback={"loss": 0.5})
    run.publish(2, epoch)
    assert run.http.patch(run.path, json={"limits": {"max_tokens_live": 10**6}}).status_code == 200
    assert ids(run.batch(2, epoch).content) == ["c"]
    epoch = run.attach(resume_step=0, on_resume="resample")
    assert ids(run.batch(0, epoch).content) == ["a"]


def test_resuming_a_run_drops_the_feedback_at_which_its_strategy_failed(
    plugged: ServeProcess, connect: Connect
) -> None:
    """Or it would fail again at once."""
    run = connect(plugged.url, "run-overheard")
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "overhears"})
    run.append(group("a"), group("b"))
    epoch = run.attach()
    run.batch(0, epoch)
    run.ack(0, epoch, feedback={"loss": 1.0})
    run.publish(1, epoch)
    assert "strategy 'overhears' raised in observe: ValueError('what?')" in run.state()["paused_reason"]
    assert run.http.patch(run.path, json={"state": "running"}).json()["state"] == "running"
    assert run.batch(1, epoch).status_code == 200


def test_filters_drop_groups_when_they_arrive_each_with_the_first_reason(
    plugged: ServeProcess, connect: Connect
) -> None:
    """What is dropped is counted and frees its place: a batch is as large as it was."""
    run = connect(plugged.url, "run-filters")
    filters = [{"name": "odd"}, {"name": "poor"}]
    run.put(batch={"groups_per_batch": 2}, filters=filters)
    tickets = run.post("tickets", producer="p", count=4).json()["tickets"]
    assert [ticket["prompt_index"] for ticket in tickets] == [0, 1, 2, 3]
    for ticket, rewards in zip(tickets, [(0, 1), (1, 1), (1, 1), (0, 1)], strict=True):
        run.append(rewarded("", *rewards) | {"group_id": None, "ticket": ticket["ticket"]})
    groups = run.state()["groups"]
    assert (groups["stored"], groups["live"], groups["evicted"]) == (4, 1, {"odd": 2, "poor": 1})
    assert run.batch(0, run.attach()).json()["reason"] == "too_few_groups"
    refill = run.post("tickets", producer="p", count=9).json()["tickets"]
    assert [ticket["prompt_index"] for ticket in refill] == [4, 5, 6]
    assert run.state()["config"]["filters"] == [{"name": "odd", "options": {}}, {"name": "poor", "options": {}}]


def test_changed_filters_check_all_live_groups(plugged: ServeProcess, connect: Connect) -> None:
    """Recorded in the ledger; a resample gives back what was dropped, and the filter drops it again."""
    run = connect(plugged.url, "run-patched")
    run.put(batch={"groups_per_batch": 1}, strategy={"options": {"max_staleness": 5}})
    run.append(rewarded("flat", 1, 1), rewarded("good", 0, 1), rewarded("also", 0, 1))
    answer = run.http.patch(run.path, json={"filters": [{"name": "poor"}]})
    assert answer.json()["groups"]["evicted"] == {"poor": 1}
    epoch = run.attach()
    assert ids(run.batch(0, epoch).content) == ["good"]
    run.ack(0, epoch)
    epoch = run.attach(on_resume="resample")
    assert run.state()["groups"]["evicted"] == {"poor": 1}
    assert ids(run.batch(0, epoch).content) == ["good"]


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("quits", "filter 'quits' raised in evict: SystemExit('drop')"),
        ("mute", "filter 'mute' broke the rule 'gives one reason per group it drops'"),
    ],
)
def test_a_filter_that_breaks_its_contract_pauses_the_run_and_loses_nothing(
    plugged: ServeProcess, connect: Connect, name: str, reported: str
) -> None:
    """All rules are in tests/kernel/test_answer_checks.py."""
    run = connect(plugged.url, f"run-{name}")
    run.put(batch={"groups_per_batch": 1}, filters=[{"name": name}])
    assert run.append(group("a"), group("b"))[0]["status"] == "stored"
    state = run.state()
    assert (state["state"], state["groups"]["live"]) == ("paused", 2)
    assert reported in state["paused_reason"]


@pytest.mark.parametrize("filters", [[{"name": "nobody"}], [{"name": "odd", "options": {"x": 1}}]])
def test_unknown_filters_and_filter_options_are_rejected(
    plugged: ServeProcess, connect: Connect, filters: list[dict[str, Any]]
) -> None:
    run = connect(plugged.url, "run-refused")
    answer = run.put(batch={"groups_per_batch": 1}, filters=filters)
    assert answer.status_code == 422, answer.text


def test_priorities_in_the_feedback_reach_the_strategy_also_after_a_restart(
    plugged: ServeProcess, connect: Connect
) -> None:
    """They come with the ack and are folded from the ledger."""
    run = connect(plugged.url, "run-priorities")
    run.put(batch={"groups_per_batch": 3}, strategy={"name": "best"})
    run.append(group("a"), group("b"), group("c"))
    epoch = run.attach()
    run.batch(0, epoch)
    for wrong in ({"d": 1.0}, {"a": -1}, {"a": "much"}, [1.0], {"a": True}):
        refused = run.ack(0, epoch, feedback={"priorities": wrong})
        assert refused.status_code == 422 and refused.json()["name"].startswith("feedback.priorities")
    assert run.ack(0, epoch, feedback={"priorities": {"a": 0.5, "b": 2, "c": 1.25}}).status_code == 200
    run.publish(1, epoch)
    assert ids(run.batch(1, epoch).content) == ["b", "c", "a"]
    plugged.kill()
    plugged.start()
    again = connect(plugged.url, "run-priorities")
    again.ack(1, epoch)
    again.publish(2, epoch)
    assert ids(again.batch(2, epoch).content) == ["b", "c", "a"]
    assert np.all(read_batch(again.batch(2, epoch).content).micro_batches[0].times_sampled == 3)


def test_a_service_starts_with_a_run_whose_plugin_is_missing(
    plugged: ServeProcess, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uninstalled between two starts: the run says which one is missing, and goes on once it is back."""
    run = connect(plugged.url, "run-gone")
    run.put(batch={"groups_per_batch": 1}, strategy={"name": "best"}, filters=[{"name": "poor"}])
    run.append(group("a"))
    epoch = run.attach()
    assert plugged.stop() == 0
    with monkeypatch.context() as patch:
        patch.delenv("PYTHONPATH")
        plugged.start()
    again = connect(plugged.url, "run-gone")
    assert again.batch(0, epoch).json()["reason"] == "paused"
    assert "strategy is 'best'; installed: on-policy, one-step-off-policy" in again.state()["paused_reason"]
    assert again.state()["groups"]["live"] == 1
    refused = again.http.patch(again.path, json={"state": "running"})
    assert (refused.status_code, refused.json()["name"]) == (422, "strategy")
    for state in ("finished", "paused"):  # what an operator may want without it
        assert again.http.patch(again.path, json={"state": state}).json()["state"] == state
    assert plugged.stop() == 0
    plugged.start()
    back = connect(plugged.url, "run-gone")
    assert back.http.patch(back.path, json={"state": "running"}).status_code == 200
    assert ids(back.batch(0, epoch).content) == ["a"]


def test_plugins_of_the_first_release_need_no_attribute_that_came_later(
    plugged: ServeProcess, connect: Connect
) -> None:
    """Their options are structs of their own, without `requires`; what they leave out has its default."""
    run = connect(plugged.url, "first-release")
    chosen = {"name": "firstrelease", "options": {"newest": True}}
    assert run.put(batch={"groups_per_batch": 1}, strategy=chosen, filters=[{"name": "firstfilter"}]).status_code == 201
    assert run.state()["config"]["filters"] == [{"name": "firstfilter", "options": {"most": 1000}}]
    epoch = run.attach()
    run.append(group("a"), group("b"), group("long", tokens=1001))
    assert ids(run.batch(0, epoch).content) == ["b"]
    assert run.state()["groups"]["evicted"] == {"long": 1}
    changed = run.http.patch(run.path, json={"strategy": {"name": "firstrelease", "options": {"newest": False}}})
    assert changed.status_code == 200, changed.text
    unknown = run.http.patch(run.path, json={"strategy": {"name": "firstrelease", "options": {"newest": 7}}})
    assert (unknown.status_code, unknown.json()["name"]) == (422, "strategy.options")
