"""docs/strategies.md keeps up with the code: its strategy keeps the contract, its examples hold."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replaybuf.kernel.plugins import FILTERS, STRATEGIES, build_strategy, load, names
from replaybuf.kernel.strategy import STRATEGY_REASONS, Budget, BufferView, Flow, Groups, Strategy
from replaybuf.testing import check_filter, check_progress, check_strategy
from tests.builders import buffer_view

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "strategies.md").read_text()


def fields_of(view: type[Any]) -> list[str]:
    """Name the fields of a view."""
    return [field.name for field in dataclasses.fields(view)]


def section(heading: str) -> str:
    """Cut one section out of the page."""
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_strategy_of_the_page_keeps_the_contract() -> None:
    """Its code is run as it stands, in no more than 40 lines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", section("Write a strategy"), re.DOTALL | re.MULTILINE)
    assert len(blocks[0].splitlines()) <= 40
    made: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/strategies.md", "exec"), made)
    check_strategy(made["TestHardestFirst"]().build)
    check_progress(made["TestHardestFirst"]().build)
    check_strategy(lambda: made["NoZeros"](made["HardestFirstOptions"]()), examples=20)


def test_the_filter_of_the_page_keeps_the_contract() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", section("Write a filter"), re.DOTALL | re.MULTILINE)
    made: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/strategies.md", "exec"), made)
    check_filter(made["TestTooShort"]().build)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("`Groups`", Groups.COLUMNS),
        ("`BufferView`", fields_of(BufferView)),
        ("`Flow`", fields_of(Flow)),
        (
            "| override",
            [name for name in vars(Strategy) if not name.startswith("_") and name != "Options"],
        ),
    ],
)
def test_what_a_strategy_is_shown_and_may_override_is_told_by_the_names_of_the_code(
    what: str, expected: Sequence[str]
) -> None:
    """One table each, every name in its first column, and no other."""
    text = section("Write a strategy")
    table = re.search(r"(?:^\|.*\n)+", text[text.index(f"\n{what}") :], re.MULTILINE)
    assert table
    cells = [row.split("|")[1] for row in table[0].splitlines()[2:]]
    told = [name for cell in cells for name in re.findall(r"`(\w+)", cell)]
    assert sorted(told) == sorted(expected)


def test_the_reasons_that_a_strategy_may_tell_are_named() -> None:
    told = section("Write a strategy").partition("`Waiting.reason` is ")[2].partition(";")[0]
    assert re.findall(r"`(\w+)`", told) == list(STRATEGY_REASONS)


@pytest.mark.parametrize("name", names(STRATEGIES))
def test_every_option_of_a_built_in_strategy_is_documented(name: str) -> None:
    options = [field.encode_name for field in msgspec.structs.fields(load(STRATEGIES, name).Options)]
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
