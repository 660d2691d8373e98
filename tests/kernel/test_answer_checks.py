"""Checks of the answers of strategies and filters: one row per rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaybuf.errors import StrategyFault
from replaybuf.kernel.rows.index import Index
from replaybuf.kernel.strategy.answer_checks import check_evictions, check_selection
from replaybuf.kernel.strategy.contract import MAX_DETAIL, Budget, Evictions, Selection, Waiting
from replaybuf.kernel.strategy.plugin_set import Bounds
from replaybuf.kernel.strategy.usability import usability_rules
from replaybuf.wire.group import hash_name
from replaybuf.wire.ledger import EvictRecord
from tests.builders import entries
from tests.kernel.test_eviction import ONE_PER_BATCH, Trial

SEQ_LEN = 8


def index_of(*values: dict[str, float]) -> Index:
    """Build an index with groups 1, 2, …; by default two of 10 tokens."""
    index = Index()
    index.insert(np.arange(1, 1 + (len(values) or 2)), entries(*(values or ({}, {}))))
    return index


def check(answer: Any, budget: Budget | None = None) -> Selection | Waiting:
    """Check an answer for a batch of one of two groups."""
    return check_selection("mine", 3, answer, index_of(), [], budget or Budget(None, 1, SEQ_LEN))


@pytest.mark.parametrize(
    ("answer", "rule", "value"),
    [
        (None, "answers Selection or Waiting", "NoneType"),
        (Waiting("mood"), "gives a reason of the closed list", "mood"),
        (Waiting("finished"), "gives a reason of the closed list", "finished"),
        (Waiting("no_groups", groups=-1), "gives usable groups as a whole number >= 0", "-1"),
        (Waiting("no_groups", tokens=1.5), "gives usable tokens as a whole number >= 0", "1.5"),  # type: ignore[arg-type]
        (Waiting("no_groups", detail="x" * (MAX_DETAIL + 1)), "gives a detail of at most 256 characters", "'xxx"),
        (Waiting("no_groups", detail=b"bytes"), "gives a detail of at most 256 characters", "b'bytes'"),  # type: ignore[arg-type]
        (Selection(np.array([], np.int64)), "selects at least one group, or returns Waiting(reason)", "rows is empty"),
        (Selection(np.array([1.5])), "selects whole groups, by their row", "[1.5]"),
        (Selection(["first", "second"]), "selects whole groups, by their row", "['first', 'second']"),  # type: ignore[arg-type]
        (Selection(np.array([[1]])), "selects whole groups, by their row", "[1]"),
        (Selection(np.array([1]), np.array([1.0, 2.0])), "gives one weight per group", "float64[2] for 1"),
        (Selection(np.array([1]), np.array(["x"])), "gives one weight per group", "<U1[1] for 1"),
        (Selection(np.array([1, 2, 1])), "selects a group once", "3"),
        (Selection(np.array([1, 4711])), "selects only groups that are stored", "[4711]"),
        (Selection(np.array([1, 2])), "keeps the group budget of 1", "2"),
        *(
            (Selection(np.array([1]), np.array([weight])), "gives finite weights above 0", "1")
            for weight in (0.0, -1.0, np.nan, np.inf, 1e300)  # the last one is infinite in the 32 bits of a trainer
        ),
    ],
)
def test_an_answer_that_breaks_a_rule_is_a_fault_with_the_rule_and_the_value(
    answer: Any, rule: str, value: str
) -> None:
    with pytest.raises(StrategyFault) as caught:
        check(answer)
    assert caught.value.detail.startswith(f"strategy 'mine' broke the rule '{rule}' at step 3: {value}")


def test_a_selection_above_the_token_budget_is_a_fault() -> None:
    with pytest.raises(StrategyFault, match="keeps the token budget of 19' at step 3: 20"):
        check(Selection(np.array([1, 2])), Budget(19, None, SEQ_LEN))
    assert isinstance(check(Selection(np.array([1, 2])), Budget(20, None, SEQ_LEN)), Selection)


def test_rows_and_weights_may_be_lists() -> None:
    """They are converted where they are checked."""
    chosen = check(Selection([2], [0.5]))  # type: ignore[arg-type]
    assert isinstance(chosen, Selection) and isinstance(chosen.weights, np.ndarray)
    assert (chosen.rows.tolist(), chosen.weights.tolist()) == ([2], [0.5])
    assert chosen.weights.dtype == np.float32


def test_the_longest_detail_is_part_of_the_answer() -> None:
    """It is part of every answer to a trainer that waits."""
    longest = Waiting("too_few_groups", detail="x" * MAX_DETAIL)
    assert check(longest) == longest


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"policy_version": 3}, "selects no group of a later version"),
        ({"policy_version": 0}, "keeps the max_staleness of 1"),
        ({"policy_version_max": 3}, "has no token of a version that is not published"),
        ({"times_sampled": 1}, "keeps the max_uses of 1"),
        ({"longest_tokens": SEQ_LEN + 1}, f"keeps the seq_len of {SEQ_LEN}"),
        ({"evicted_at": 2}, "selects only live groups"),
    ],
)
def test_a_selected_group_is_held_to_the_rules_of_the_core(values: dict[str, int], rule: str) -> None:
    """Against the index, whatever a strategy did to the columns that it saw: group 3 is fine, group 4 breaks a rule."""
    trial = Trial(batch=ONE_PER_BATCH)
    trial.store_many(2)
    trial.train(2)
    trial.store(*({"policy_version": 2, "policy_version_max": 2},) * 2)
    if "evicted_at" in values:
        trial.apply(EvictRecord(step=2, numbers={"too_stale": [4]}))
    for name, value in values.items():
        trial.state.index[name][3] = value
    assert_only_the_first_may_be_selected(trial, "", (3, 4), rule)


def test_a_group_of_another_adapter_is_not_selected() -> None:
    trial = Trial(batch=ONE_PER_BATCH)
    trial.state.published["math"] = 0
    trial.store(*({"adapter": hash_name(name)} for name in ("math", "code")))
    assert_only_the_first_may_be_selected(trial, "math", (1, 2), "selects only groups it was given")


def assert_only_the_first_may_be_selected(trial: Trial, adapter: str, numbers: tuple[int, int], rule: str) -> None:
    """Check two groups against the rules of the next step: the second one breaks `rule`."""
    state, step = trial.state, trial.state.step
    rules = tuple(usability_rules(state, trial.selector.config, Bounds(1, 1, 0), SEQ_LEN, step, adapter))
    budget = Budget(None, 2, SEQ_LEN)
    check_selection("mine", step, Selection(np.array(numbers[:1])), state.index, rules, budget)
    with pytest.raises(StrategyFault) as caught:
        check_selection("mine", step, Selection(np.array(numbers)), state.index, rules, budget)
    assert caught.value.detail == f"strategy 'mine' broke the rule '{rule}' at step {step}: [{numbers[1]}]"


@pytest.mark.parametrize(
    ("answer", "rule", "value"),
    [
        (None, "answers Evictions", "NoneType"),
        (Evictions((1, 2), ("one",)), "gives one reason per group it drops", "1"),
        (Evictions((1.5,), ("half",)), "drops whole groups, by their row", "[1.5]"),  # type: ignore[arg-type]
        (Evictions((4711,), ("stolen",)), "drops only groups it was given", "[4711]"),
        (Evictions((2,), ("not given",)), "drops only groups it was given", "[2]"),
        (Evictions((1,), ("Two words",)), "gives words as reasons", "['Two words']"),
        (Evictions((1,), (7,)), "gives words as reasons", "[7]"),  # type: ignore[arg-type]
    ],
)
def test_an_eviction_that_breaks_a_rule_is_a_fault(answer: Any, rule: str, value: str) -> None:
    """The filter was given the first of two groups."""
    with pytest.raises(StrategyFault) as caught:
        check_evictions("filter 'mine'", answer, index_of(), np.array([0]))
    assert caught.value.detail == f"filter 'mine' broke the rule '{rule}': {value}"


def test_evictions_may_be_arrays() -> None:
    dropped = check_evictions("filter 'mine'", Evictions(np.array([2]), ["flat"]), index_of(), np.array([0, 1]))
    assert dropped == Evictions((2,), ("flat",))
