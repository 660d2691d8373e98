"""Bits of columns: in index entries of any release, and as the rule for groups that a batch may use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import StrategyFault
from replaybuf.kernel.rows.column_bits import UNKNOWN_BIT, bits_of, have_all, names_of
from replaybuf.kernel.rows.index import ENTRY, Index
from replaybuf.kernel.strategy.answer_checks import check_selection
from replaybuf.kernel.strategy.contract import Budget, Selection
from replaybuf.kernel.strategy.usability import UsabilityRule
from replaybuf.wire.late_columns import FIXED_NAMES, MOST_PARTS
from tests.builders import entries

PARTS = [f"rewards.p{number}" for number in range(MOST_PARTS)]
NAMES = st.sets(st.sampled_from([*FIXED_NAMES, *PARTS]))


def test_an_entry_of_an_older_release_has_no_columns() -> None:
    """It had four bytes for the truncated rollouts, of which a group has at most 32,768."""
    older = np.dtype([(name, ENTRY[name]) for name in ENTRY.names or () if name != "columns"])
    older = np.dtype([(name, "<i4" if name == "truncated" else older[name]) for name in older.names or ()])
    assert older.itemsize == ENTRY.itemsize
    written = np.zeros(1, older)
    written["truncated"], written["tokens"] = 32_768, 7
    read = np.frombuffer(written.tobytes(), ENTRY)[0]
    assert (int(read["truncated"]), int(read["columns"]), int(read["tokens"])) == (32_768, 0, 7)


@given(NAMES)
def test_every_set_of_columns_has_its_own_bits(names: set[str]) -> None:
    assert names_of(bits_of(names, PARTS), PARTS) == [name for name in (*FIXED_NAMES, *PARTS) if name in names]
    assert bits_of(names, PARTS) < UNKNOWN_BIT


@given(st.lists(NAMES, min_size=1, max_size=8), NAMES.filter(bool), st.booleans())
def test_no_batch_holds_a_group_without_its_required_columns(
    held: list[set[str]], required: set[str], known: bool
) -> None:
    parts = PARTS if known else []
    bits = bits_of(required, parts)
    index = Index()
    index.insert(np.arange(1, len(held) + 1), entries(*({"tokens": 2} for _ in held)))
    index["columns"][:] = [bits_of(names, PARTS) for names in held]
    rule = UsabilityRule("needs columns", ("columns",), lambda columns: have_all(columns, bits), "missing_columns")
    unknown = bits >= UNKNOWN_BIT
    complete = [number for number, names in enumerate(held, 1) if required <= names and not unknown]
    budget = Budget(None, len(held), 64)
    assert (np.flatnonzero(rule.holds(index)) + 1).tolist() == complete
    if complete:
        check_selection("s", 0, Selection(np.array(complete)), index, [rule], budget)
    for number in {*range(1, len(held) + 1)} - {*complete}:
        with pytest.raises(StrategyFault, match="needs columns"):
            check_selection("s", 0, Selection(np.array([*complete, number])), index, [rule], budget)
