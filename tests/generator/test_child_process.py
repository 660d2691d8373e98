"""Child processes: numbered answers in any order, and an error for every request that a dead process leaves."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import msgspec
import pytest

from replaybuf.generator.child_process import ChildEnded, ChildProcess
from replaybuf.wire.pipes import framed, received
from tests.generator.doubles import TIMEOUT_S

WORKER = """
import os
import msgspec
from replaybuf.wire.pipes import claim_pipes, received
from tests.generator.test_child_process import Word
requests, send = claim_pipes()
print("not a message")
send(0, Word(text="ready"))
held = []
for number, word in received(requests, msgspec.msgpack.Decoder(Word)):
    if word.text == "exit":
        os._exit(3)
    held.append((number, word))
    while len(held) == 2:
        send(*held.pop())
        send(*held.pop())
"""


class Word(msgspec.Struct):
    """A request, and its answer."""

    text: str


@pytest.fixture
def child() -> Iterator[ChildProcess[Word]]:
    """A process that answers two requests at once, the second one first."""
    made = ChildProcess[Word]([sys.executable, "-c", WORKER], Word)
    yield made
    made.end()


def test_answers_find_their_requests_in_any_order(child: ChildProcess[Word]) -> None:
    assert child.first.result(TIMEOUT_S).text == "ready"
    (first_id, first), (second_id, second) = child.send(Word("a")), child.send(Word("b"))
    assert (first.result(TIMEOUT_S).text, second.result(TIMEOUT_S).text) == ("a", "b")
    assert first_id != second_id and child.answered(first_id)


def test_requests_of_a_dead_process_fail_before_and_after_its_end(child: ChildProcess[Word]) -> None:
    futures = [child.send(Word(text))[1] for text in ("a", "exit")]
    for future in (*futures, child.send(Word("b"))[1]):
        with pytest.raises(ChildEnded):
            future.result(TIMEOUT_S)


def test_a_process_that_ends_before_it_is_ready_fails_the_first_answer() -> None:
    child = ChildProcess[Word]([sys.executable, "-c", ""], Word)
    with pytest.raises(ChildEnded):
        child.first.result(TIMEOUT_S)
    child.end()


def test_an_incomplete_message_is_ignored() -> None:
    stream = framed(1, Word("a")) + framed(2, Word("b"))
    decoder = msgspec.msgpack.Decoder(Word)
    for cut in range(len(framed(1, Word("a"))), len(stream)):
        assert list(received(io.BytesIO(stream[:cut]), decoder)) == [(1, Word("a"))]
