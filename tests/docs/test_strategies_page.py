"""Pages on strategies and filters: their plug-ins pass the contract suite, tables and figures are those of the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf.kernel.strategy.contract import STRATEGY_REASONS, Budget, Flow, Groups, Strategy
from replaybuf.kernel.strategy.options import StrategyOptions
from replaybuf.kernel.strategy.plugin_set import build_strategy
from replaybuf.plugins.entry_points import FILTERS, STRATEGIES, load, names
from replaybuf.testing import check_filter, check_progress, check_strategy
from tests.builders import buffer_view

ROOT = Path(__file__).parents[2]
NAMES = ("strategies.md", "replay.md", "filters.md", "write-a-strategy.md")
PAGES = "\n".join((ROOT / "docs" / name).read_text() for name in NAMES)


def section(heading: str) -> str:
    """Cut one section out of the pages, or a whole page by its title."""
    start = re.search(rf"^(#+) {re.escape(heading)}\n", PAGES, re.MULTILINE)
    assert start, heading
    return re.split(rf"^#{{1,{len(start[1])}}} ", PAGES[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_strategy_of_the_page_keeps_the_contract() -> None:
    """The code of the page runs unchanged."""
    blocks = re.findall(r"^```python\n(.*?)^```$", section("Write a strategy"), re.DOTALL | re.MULTILINE)
    made: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/write-a-strategy.md", "exec"), made)
    check_strategy(made["TestHardestFirst"]().build)
    check_progress(made["TestHardestFirst"]().build)


def test_the_filter_of_the_page_keeps_the_contract() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", section("Write a filter"), re.DOTALL | re.MULTILINE)
    made: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/write-a-strategy.md", "exec"), made)
    check_filter(made["TestTooShort"]().build)


def test_the_table_of_overrides_has_every_member_of_a_strategy() -> None:
    table = section("Write a strategy").partition("| override")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1])]
    members = [name for name in vars(Strategy) if not name.startswith("_") and name != "Options"]
    assert sorted(named) == sorted(members)


def test_the_docstring_of_groups_names_every_column() -> None:
    """The Python API is made from it."""
    assert {name for name in Groups.COLUMNS if f"`{name}`" not in str(Groups.__doc__)} == set()


def test_replay_uses_a_group_as_often_as_the_page_says(tmp_path: Path) -> None:
    """41 % of a batch is generated per step, and a group is used 2.5 times, within 0.05 and 0.3."""
    command = [sys.executable, "-m", "replaybuf", "simulate", "--strategy", "replay", "--steps", "60"]
    subprocess.run([*command, "--report-dir", str(tmp_path)], check=True, capture_output=True, timeout=250)
    (run,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    uses = sum(int(times) * groups for times, groups in run["uses"].items())
    used = sum(run["uses"].values())
    assert run["generated_groups"] / uses == pytest.approx(0.41, abs=0.05)
    assert uses / used == pytest.approx(2.5, abs=0.3)


def test_the_page_names_the_waiting_reasons_of_strategies() -> None:
    named = section("Write a strategy").partition("`Waiting.reason` is ")[2].partition(";")[0]
    assert re.findall(r"`(\w+)`", named) == list(STRATEGY_REASONS)


@pytest.mark.parametrize("name", names(STRATEGIES))
def test_every_option_of_a_built_in_strategy_is_documented(name: str) -> None:
    of_all = StrategyOptions.__struct_fields__
    fields = msgspec.structs.fields(load(STRATEGIES, name).Options)
    options = [field.encode_name for field in fields if field.name not in of_all]
    assert {option for option in options if f"| `{option}` |" not in section(name)} == set()
    assert section(name)


def test_every_filter_its_options_and_its_reasons_are_documented() -> None:
    code = (ROOT / "strategies" / "replaybuf_strategies" / "filters.py").read_text()
    reasons = set(re.findall(r", \"(\w+)\"\)", code))
    assert len(reasons) == 5
    options = {
        field.encode_name for name in names(FILTERS) for field in msgspec.structs.fields(load(FILTERS, name).Options)
    }
    for word in {*reasons, *options, *names(FILTERS)}:
        assert f"`{word}`" in section("Filters"), word


def capacity(name: str, options: dict[str, Any], **fields: Any) -> int:
    """Ask for admission with batches of 64 groups."""
    view = buffer_view(budget=Budget(None, 64, 4096), **fields)
    return build_strategy(name, options).admit(view, Flow(0.0, 100.0))


def test_the_examples_of_admission_give_the_figures_of_the_page() -> None:
    """On-policy, one-step-off-policy, replay and its rate."""
    assert capacity("on-policy", {}, step=5, version=5, published_version=5) == 64
    assert capacity("on-policy", {}, step=5, version=5, published_version=4) == 0
    window = {"step": 6, "version": 6, "groups_live": 40, "tokens_live": 4000, "tickets_out": 10}
    assert capacity("one-step-off-policy", {}, published_version=5, **window) == 14
    assert capacity("one-step-off-policy", {}, published_version=6, **window) == 14 + 64
    assert capacity("replay", {}, step=10, version=10, published_version=10) == 80
    after = {"step": 11, "version": 11, "groups_live": 80, "tokens_live": 8000, "uses_live": 64}
    assert capacity("replay", {}, published_version=10, **after) == 0
    assert capacity("replay", {}, published_version=11, **after) == 16
    rate = {"samples_per_insert": 2, "error_buffer": 100, "max_staleness": 9}
    stored = {"step": 10, "version": 10, "published_version": 10, "groups_live": 100, "tokens_live": 10_000}
    assert capacity("replay", rate, groups_stored=500, groups_used=1000, **stored) == 50
