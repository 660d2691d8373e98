"""Failures as a producer describes them: a traceback without secrets of the environment, in bounded time and size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from urllib.parse import quote

import pytest

from replaybuf.client.producers import describe_failure
from replaybuf.client.producers.failures import LEAST_SECRET_CHARS, WINDOW_CHARS, redact
from replaybuf.wire.contract import TRACEBACK_BYTES
from replaybuf.wire.names import check_strings

SECRET = "hunter2 'quoted' \"twice\" ö/=%\\end"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """A secret in the environment."""
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    return SECRET


def test_a_traceback_names_cause_file_and_line_and_the_variable_instead_of_its_value(secret: str) -> None:
    try:
        try:
            raise KeyError(f"no {secret}")
        except KeyError as error:
            raise ValueError(f"the judge refused {secret}") from error
    except ValueError as error:
        failure = describe_failure("reward_raised", error, 7)
    assert (failure.reason, failure.prompt_index) == ("reward_raised", 7)
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert "test_failures.py" in failure.traceback and "KeyError" in failure.traceback
    assert failure.traceback.endswith("ValueError: the judge refused $JUDGE_KEY")
    assert "hunter2" not in failure.traceback


@pytest.mark.parametrize("write", [str, repr, ascii, json.dumps, quote, str.strip])
def test_a_value_is_replaced_however_a_text_writes_it(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[str], str]
) -> None:
    """And in the `repr` of an error with that text, whose quotes escape those of the value."""
    for value in (f"{SECRET}\n", "line one\nline two\n", "it's a hunter2", 'a "hunter2"'):
        monkeypatch.setenv("JUDGE_KEY", value)
        text = f'it\'s "{write(value)}"'
        for shown in (redact(text), redact(repr(ValueError(text))), redact(ascii(ValueError(text)))):
            assert "hunter2" not in shown and "line two" not in shown and "$JUDGE_KEY" in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("get https://me:word@host/path", "get https://***@host/path"),
        ("{'Authorization': 'Bearer abc.def-123'}", "{'Authorization': 'Bearer ***'}"),
        ("token rb_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG is unknown", "token rb_*** is unknown"),
        ("a\x00b\x1b[31m\u202e\ud800", "a\ufffdb\ufffd[31m\ufffd\ufffd"),
        ("short: tiny", "short: tiny"),
    ],
)
def test_credentials_and_hidden_characters_are_replaced_anywhere(
    monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    """A value below six characters is an ordinary word."""
    assert len("tiny") < LEAST_SECRET_CHARS
    monkeypatch.setenv("SIZE", "tiny")
    assert redact(text) == shown


def test_a_secret_that_the_program_has_removed_from_its_environment_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replaybuf.client.producers.failures._AT_START", frozenset({("GONE_KEY", SECRET)}))
    assert redact(f"with {SECRET}") == "with $GONE_KEY"


def test_a_long_text_keeps_its_ends_and_no_part_of_a_secret_at_any_cut(secret: str) -> None:
    for shift in range(0, len(secret) + 1, 3):
        for text in (
            "x" * (WINDOW_CHARS - shift) + secret + "y" * (4 * WINDOW_CHARS) + "end",
            "begin" + "x" * (4 * WINDOW_CHARS) + secret + "y" * (WINDOW_CHARS - shift),
        ):
            failure = describe_failure("reward_raised", text)
            check_strings(failure)
            assert len(failure.traceback.encode()) <= TRACEBACK_BYTES
            assert failure.traceback[:5] == text[:5] and failure.traceback[-3:] == text[-3:]
            shown = redact(text)
            assert not any(part in shown for part in (secret[:8], secret[-8:], secret[8:16]))


def test_a_text_of_many_megabytes_takes_as_long_as_a_small_one() -> None:
    """The event loop of a generator waits for it."""

    def least_s(text: str) -> float:
        """Processor time of this thread, the best of several: others may use the machine."""
        used_s = []
        for _ in range(5):
            began_s = time.thread_time()
            describe_failure("reward_raised", text)
            used_s.append(time.thread_time() - began_s)
        return min(used_s)

    small, large = "é" * (3 * WINDOW_CHARS), "é" * 50_000_000
    assert least_s(large) < 20 * least_s(small)
