"""The set of prompts against Python's own set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.prompt_set import PromptSet

PROMPTS = st.tuples(st.sampled_from(["", "a"]), st.integers(0, 40))


@given(st.lists(st.tuples(st.booleans(), PROMPTS)))
def test_it_is_a_set_whatever_is_put_in_and_taken_out(changes: list[tuple[bool, tuple[str, int]]]) -> None:
    """Members, number, order by index, equality, and the way through a snapshot."""
    mine, plain = PromptSet(), set[tuple[str, int]]()
    for added, prompt in changes:
        (mine.add if added else mine.discard)(*prompt)
        (plain.add if added else plain.discard)(prompt)
    assert (len(mine), set(mine)) == (len(plain), plain)
    assert all((prompt in mine) == (prompt in plain) for _, prompt in changes)
    again = PromptSet(mine.bits)
    assert again == mine and len(again) == len(mine)
    again.add("b", 0)
    assert again != mine


def test_ten_million_prompts_take_a_megabyte_and_a_quarter() -> None:
    """Whether few of them are in it or many."""
    prompts = PromptSet()
    for index in (0, 9_999_999):
        prompts.add("", index)
    assert ("", 10_000_000) not in prompts
    assert len(prompts.bits[""]) == 1_250_000
