"""The error tree, and errors as problem documents in both directions."""

from __future__ import annotations

import inspect
import json
import re
from http import HTTPStatus
from typing import Any

import pytest

from replaybuf import errors
from replaybuf.client.replies import from_problem
from replaybuf.errors import (
    BatchOverdue,
    BrokenFrame,
    Conflict,
    EngineAway,
    EngineFault,
    EngineUnfit,
    Fenced,
    GenerationFault,
    Gone,
    GroupAborted,
    GroupRejected,
    Invalid,
    InvalidGroups,
    Malformed,
    MissingExtra,
    NoRoom,
    NotFound,
    NotLeader,
    PromptFault,
    ReplaybufError,
    RewardFault,
    RunFinished,
    ServiceUnavailable,
    WrongStep,
)

LOCAL: set[type[ReplaybufError]] = {
    GroupRejected,
    GenerationFault,
    EngineFault,
    EngineAway,
    EngineUnfit,
    GroupAborted,
    PromptFault,
    RewardFault,
    BatchOverdue,
    MissingExtra,
}
"""Errors that never cross HTTP."""


def all_errors() -> list[type[ReplaybufError]]:
    """List every error class that the module defines."""
    return [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, ReplaybufError)]


REMOTE = sorted(set(all_errors()) - LOCAL, key=str)


def build(cls: type[ReplaybufError]) -> ReplaybufError:
    """Build an error with name, value and bound."""
    fields: dict[str, Any] = {"name": "step", "value": 7, "bound": [0, 5]}
    if cls is InvalidGroups:
        return InvalidGroups("step is 7", [{"group_id": "g", "status": "rejected", "reason": "overlong"}], **fields)
    return cls("step is 7", **fields)


# ---------------------------------------------------------------------- the table


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    """Names, parents, and the drawn statuses."""
    drawn: dict[str, tuple[str, str | None]] = {}
    path: list[str] = ["ReplaybufError"]
    for indent, name, status in re.findall(r"^    ([│ ]*)[├└]── (\w+)\s+(\d{3})?", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 4 + 1
        path[depth:] = [name]
        drawn[name] = (path[depth - 1], status or None)
    coded = {cls.__name__: cls for cls in all_errors() if cls is not ReplaybufError}
    assert drawn.keys() == coded.keys()
    for name, (parent, status) in drawn.items():
        assert coded[name].__bases__[0].__name__ == parent
        assert status is None or int(status) == coded[name].status, name


def test_every_error_has_its_own_slug_a_title_and_a_known_status() -> None:
    slugs = [cls.slug for cls in all_errors()]
    assert len(set(slugs)) == len(slugs)
    for cls in all_errors():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cls.slug) and cls.title and cls.__doc__
        assert HTTPStatus(cls.status) >= 400


# ---------------------------------------------------------------------- problem documents


def test_a_problem_document_has_the_fields_of_rfc_9457_and_name_value_bound() -> None:
    assert Invalid("seed is -1; at least 0", name="seed", value=-1, bound=0).problem() == {
        "type": "urn:replaybuf:problem:invalid",
        "title": "Invalid value",
        "status": 422,
        "detail": "seed is -1; at least 0",
        "name": "seed",
        "value": -1,
        "bound": 0,
    }


def test_a_problem_without_a_name_has_no_machine_fields() -> None:
    assert NotFound("no such page").problem().keys() == {"type", "title", "status", "detail"}


@pytest.mark.parametrize("cls", REMOTE, ids=repr)
def test_every_remote_error_keeps_its_class_through_a_problem_document(cls: type[ReplaybufError]) -> None:
    """Class, message, name, value and bound stay the same."""
    sent = build(cls)
    read = from_problem(cls.status, json.loads(json.dumps(sent.problem())))
    assert type(read) is cls
    assert read.problem() == sent.problem()
    assert str(read) == read.detail == "step is 7"


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (400, Malformed),
        (404, NotFound),
        (409, Conflict),
        (410, Gone),
        (422, Invalid),
        (429, NoRoom),
        (503, ServiceUnavailable),
        (500, ReplaybufError),
        (418, ReplaybufError),
    ],
)
def test_an_unknown_answer_is_read_by_its_status(status: int, cls: type[ReplaybufError]) -> None:
    """An answer of a proxy, or a slug of a later release, becomes the nearest general class."""
    for document in ({}, {"type": "urn:replaybuf:problem:from-the-future"}, {"type": "about:blank", "detail": "no"}):
        assert type(from_problem(status, document)) is cls


@pytest.mark.parametrize("cls", sorted(LOCAL, key=str), ids=repr)
def test_a_local_error_is_not_built_from_an_answer(cls: type[ReplaybufError]) -> None:
    """Their constructors need more than a problem document has."""
    read = from_problem(cls.status, {"type": f"urn:replaybuf:problem:{cls.slug}", "detail": "x"})
    assert type(read) not in LOCAL


def test_the_message_of_an_empty_answer_is_its_status() -> None:
    assert str(from_problem(502, {})) == "HTTP status 502"
    assert str(from_problem(502, {"title": "Bad gateway"})) == "Bad gateway"


def test_retry_after_comes_from_the_header() -> None:
    assert from_problem(429, {}, retry_after_s=7.5).retry_after_s == 7.5
    assert from_problem(429, {}).retry_after_s == NoRoom("full").retry_after_s == 1.0
    assert from_problem(404, {}).retry_after_s is None


def test_a_problem_document_keeps_the_results_of_rejected_groups() -> None:
    sent = build(InvalidGroups)
    read = from_problem(422, sent.problem())
    assert isinstance(read, InvalidGroups) and read.results == sent.problem()["results"]
    bare = from_problem(422, {"type": "urn:replaybuf:problem:invalid-groups", "results": None})
    assert isinstance(bare, InvalidGroups) and bare.results == []


# ---------------------------------------------------------------------- what callers rely on


@pytest.mark.parametrize(
    ("cls", "caught_as"),
    [
        (BrokenFrame, Malformed),
        (GroupRejected, Invalid),
        (Fenced, Conflict),
        (WrongStep, Conflict),
        (NotLeader, ServiceUnavailable),
        (RunFinished, Gone),
        (EngineAway, EngineFault),
    ],
)
def test_a_specific_error_is_caught_as_its_general_class(
    cls: type[ReplaybufError], caught_as: type[ReplaybufError]
) -> None:
    assert issubclass(cls, caught_as) and cls.status == caught_as.status


def test_a_missing_extra_names_its_install_command() -> None:
    assert "pip install 'replaybuf[trainer]'" in str(MissingExtra("replaybuf train", "trainer"))
    adapter = str(MissingExtra("the environment", adapter="verifiers"))
    assert adapter.endswith(": pip install replaybuf-verifiers (in a checkout: pip install ./adapters/verifiers)")


def test_a_rejected_group_keeps_its_reason() -> None:
    rejected = GroupRejected("overlong", "a rollout has 9 tokens", name="seq_len", value=9, bound=8)
    assert (rejected.reason, rejected.detail, rejected.bound) == ("overlong", "a rollout has 9 tokens", 8)


def test_a_long_value_and_message_are_shortened() -> None:
    """A string of megabytes must not fill answers and logs."""
    error = Invalid(f"name is {'x' * 10**6}", name="name", value="x" * 10**6)
    assert len(str(error)) < 5000 and len(str(error.problem())) < 10_000
    assert error.problem()["value"].endswith("(1000000 characters)")
