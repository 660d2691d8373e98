"""Prompt set compared with a Python set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.kernel.rows.prompt_set import PromptSet

PROMPTS = st.tuples(st.sampled_from(["", "a"]), st.integers(0, 40))


@given(st.lists(st.tuples(st.booleans(), PROMPTS)))
def test_a_prompt_set_equals_a_python_set_after_any_changes(changes: list[tuple[bool, tuple[str, int]]]) -> None:
    """Also after a copy through its bitmaps, as in a snapshot."""
    prompts, expected = PromptSet(), set[tuple[str, int]]()
    for added, prompt in changes:
        (prompts.add if added else prompts.discard)(*prompt)
        (expected.add if added else expected.discard)(prompt)
    assert (len(prompts), set(prompts)) == (len(expected), expected)
    assert all((prompt in prompts) == (prompt in expected) for _, prompt in changes)
    again = PromptSet(prompts.bits)
    assert again == prompts and len(again) == len(prompts)
    again.add("b", 0)
    assert again != prompts


def test_ten_million_prompts_take_a_megabyte_and_a_quarter() -> None:
    """However few of them are in the set."""
    prompts = PromptSet()
    for index in (0, 9_999_999):
        prompts.add("", index)
    assert ("", 10_000_000) not in prompts
    assert len(prompts.bits[""]) == 1_250_000
