"""Plug-ins are known by name alone, and found through entry points of whatever distribution brings them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf.errors import Invalid
from replaybuf.kernel.strategy import plugin_set
from replaybuf.kernel.strategy.contract import Budget, BufferView, Groups, Selection, Strategy, Waiting
from replaybuf.kernel.strategy.options import StrategyOptions
from replaybuf.kernel.strategy.plugin_set import build_strategy
from replaybuf.plugins import entry_points as plugins
from replaybuf.plugins.entry_points import COMMANDS, ENVIRONMENTS, FILTERS, STRATEGIES, find, load, names


class MineOptions(StrategyOptions, frozen=True):
    """One option."""

    share: float = 0.5


class Mine(Strategy[MineOptions]):
    """A strategy of somebody else's distribution."""

    Options = MineOptions

    def select(
        self, groups: Groups, buffer: BufferView, budget: Budget, rng: np.random.Generator
    ) -> Selection | Waiting:
        return Waiting("no_groups")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let two strategies and a broken one be installed, and nothing else."""
    plug_ins = EntryPoints(
        [
            EntryPoint("mine", "tests.plugins.test_entry_points:Mine", STRATEGIES),
            EntryPoint("broken", "tests.no_such_module:X", STRATEGIES),
            EntryPoint("another", "tests.plugins.test_entry_points:Mine", STRATEGIES),
            EntryPoint("exact", "tests.plugins.test_entry_points:Mine", ENVIRONMENTS),
        ]
    )

    def entry_points(**selection: Any) -> EntryPoints:
        return plug_ins.select(**selection)

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()


def test_what_is_installed_while_the_process_runs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed is read once; a name that is not among it is looked for anew."""
    entry_points: list[EntryPoint] = []
    monkeypatch.setattr(plugins, "entry_points", lambda **selection: EntryPoints(entry_points).select(**selection))
    plugins.installed.cache_clear()
    try:
        with pytest.raises(Invalid, match="installed: none"):
            find(STRATEGIES, "mine")
        entry_points.append(EntryPoint("mine", "tests.plugins.test_entry_points:Mine", STRATEGIES))
        assert load(STRATEGIES, "mine") is Mine
        entry_points.clear()
        assert names(STRATEGIES) == ["mine"]
    finally:
        plugins.installed.cache_clear()


@pytest.mark.usefixtures("installed")
def test_names_are_told_in_order_and_by_group() -> None:
    assert names(STRATEGIES) == ["another", "broken", "mine"]
    assert names(ENVIRONMENTS) == ["exact"]
    assert names(FILTERS) == []


@pytest.mark.usefixtures("installed")
def test_a_strategy_of_anybody_is_built_with_its_options() -> None:
    strategy = build_strategy("mine", {"share": 0.25})
    assert isinstance(strategy, Mine) and strategy.options == MineOptions(share=0.25)


@pytest.mark.usefixtures("installed")
def test_options_are_held_to_the_strategys_own() -> None:
    with pytest.raises(Invalid, match=r"options of strategy 'mine': .*valid options: share: number \(default 0.5\)"):
        build_strategy("mine", {"shares": 1})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("group", "kind", "known"),
    [
        (STRATEGIES, "strategy", "another, broken, mine"),
        (FILTERS, "filter", "none"),
        (ENVIRONMENTS, "environment", "exact"),
        (COMMANDS, "command", "none"),
    ],
)
def test_an_unknown_name_is_refused_with_the_installed_ones(group: str, kind: str, known: str) -> None:
    with pytest.raises(Invalid) as caught:
        find(group, "minne")
    assert caught.value.detail == f"{kind} is 'minne'; installed: {known}"
    assert (caught.value.name, caught.value.value, caught.value.bound) == (kind, "minne", names(group))


@pytest.mark.usefixtures("installed")
def test_a_plug_in_that_does_not_import_is_told_with_its_cause() -> None:
    with pytest.raises(Invalid, match=r"'broken' \(tests.no_such_module:X\) does not import: ModuleNotFound") as caught:
        load(STRATEGIES, "broken")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_the_built_ins_come_through_the_same_door() -> None:
    """In the installed distribution: strategies, environments and commands that its metadata promise."""
    assert {"on-policy", "one-step-off-policy"} <= set(names(STRATEGIES))
    assert {"exact-match", "reasoning-gym"} <= set(names(ENVIRONMENTS))
    assert {"train", "engine", "init-model"} <= set(names(COMMANDS))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise SystemExit('gone')", r"plug-in 'own' \(own_import:X\) does not import: SystemExit\('gone'\)"),
        ("import time; time.sleep(5)", r"import of strategy 'own' did not return within 0.2 s"),
    ],
)
def test_an_import_that_ends_the_process_or_does_not_end_is_refused(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_import.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points = EntryPoints([EntryPoint("own", "own_import:X", STRATEGIES)])
    monkeypatch.setattr(plugins, "installed", lambda group: entry_points.select(group=group))
    monkeypatch.setattr(plugin_set, "IMPORT_LIMIT_S", 0.2)
    with pytest.raises(Invalid, match=message):
        build_strategy("own", {})
