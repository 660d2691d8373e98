"""The bounds of strings, and of every field that a request may have."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import msgspec.inspect as inspect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import Invalid
from replaybuf.service.http.call.calls import CALLS
from replaybuf.wire.answer.evaluations import EvaluationRequest
from replaybuf.wire.contract import PolicyRequest, TicketRequest
from replaybuf.wire.group import GroupJson, RolloutJson
from replaybuf.wire.names import LONGEST_NAME_BYTES, LONGEST_URI_BYTES, check_string, check_strings

CHECKED_ELSEWHERE = {
    "AckRequest.feedback": "by the size of the body and check_metadata",
    "AckRequest.metrics": "by their number and the bound of a name",
    "StrategySpec.options": "by check_run_config",
    "StrategyChange.options": "by check_run_config",
    "AdmissionSpec.options": "by check_run_config",
    "ColumnsRequest.columns": "by the size of the body, and against the group",
    "EvaluationRequest.reward_mean": "finite, by record_evaluation",
    "EvaluationRequest.standard_error": "finite, by record_evaluation",
    "EvaluationRequest.parts": "finite, by record_evaluation",
    "EvaluationRequest.temperature": "finite, by record_evaluation",
    "EvaluationRequest.seconds": "finite, by record_evaluation",
    "GroupsRequest.groups": "by the size of the body",
}
"""Fields that their type does not bound, and what does. Groups are checked by `check_group`, as frames are."""


def fields_without_bound(kind: inspect.Type) -> Iterator[str]:
    """Name what is unbounded in a type: text, numbers, lists, maps."""
    match kind:
        case inspect.Metadata() if kind.extra and "most_bytes" in kind.extra:
            return
        case inspect.Metadata():
            yield from fields_without_bound(kind.type)
        case inspect.UnionType():
            for part in kind.types:
                yield from fields_without_bound(part)
        case inspect.StrType() if kind.pattern is None and kind.max_length is None:
            yield "text"
        case inspect.IntType() | inspect.FloatType():
            low = kind.ge is not None or kind.gt is not None
            if not low or (kind.le is None and kind.lt is None):
                yield "number"
        case inspect.ListType():
            yield from ["list"] if kind.max_length is None else fields_without_bound(kind.item_type)
        case inspect.DictType():
            yield from ["map"] if kind.max_length is None else fields_without_bound(kind.key_type)
            yield from fields_without_bound(kind.value_type)
        case inspect.AnyType():
            yield "any value"


def structs_in(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """List the structs inside a type."""
    match kind:
        case inspect.StructType():
            yield kind.cls
            for field in kind.fields:
                yield from structs_in(field.type)
        case inspect.Metadata():
            yield from structs_in(kind.type)
        case inspect.UnionType():
            for part in kind.types:
                yield from structs_in(part)
        case inspect.ListType():
            yield from structs_in(kind.item_type)
        case inspect.DictType():
            yield from structs_in(kind.value_type)


def test_every_field_of_every_request_is_bounded() -> None:
    """A new field without a bound fails here."""
    shapes = {shape for call in CALLS if call.body for shape in structs_in(inspect.type_info(call.body))}
    unbounded = {
        f"{shape.__name__}.{field.name}": what
        for shape in shapes - {GroupJson, RolloutJson}
        for field in inspect.type_info(shape).fields  # type: ignore[attr-defined]
        for what in fields_without_bound(field.type)
    }
    assert set(unbounded) == set(CHECKED_ELSEWHERE), unbounded


def test_every_string_of_a_group_is_bounded() -> None:
    """Other fields of a group are bounded by its columns and by `check_group`."""
    for shape in (GroupJson, RolloutJson):
        for field in inspect.type_info(shape).fields:  # type: ignore[attr-defined]
            assert field.name == "metadata" or "text" not in list(fields_without_bound(field.type)), field.name


@given(st.text(max_size=300))
def test_a_name_is_printable_and_has_at_most_256_bytes(name: str) -> None:
    """One character takes up to 4 bytes."""
    allowed = name.isprintable() and len(name.encode("utf-8", "surrogatepass")) <= LONGEST_NAME_BYTES
    try:
        check_string("group_id", name)
    except Invalid as error:
        assert not allowed and error.name == "group_id" and error.bound in ("printable", LONGEST_NAME_BYTES)
    else:
        assert allowed


@pytest.mark.parametrize("name", ["a" * 256, "\u00e9" * 128, "\u6570" * 85, "\U0001f600" * 64, "a b", ""])
def test_a_name_at_the_bound_is_accepted(name: str) -> None:
    check_string("group_id", name)


@pytest.mark.parametrize("name", ["a" * 257, "\u00e9" * 129, "\u6570" * 86, "\U0001f600" * 65])
def test_a_name_above_the_bound_is_rejected_with_its_size(name: str) -> None:
    with pytest.raises(Invalid, match=rf"group_id has {len(name.encode())} bytes; the maximum is 256"):
        check_string("group_id", name)


@pytest.mark.parametrize("character", ["\n", "\0", "\x7f", "\u200b", "\u2028", "\ud800"])
def test_a_character_that_is_not_printable_is_rejected_with_its_position(character: str) -> None:
    with pytest.raises(Invalid, match=rf"U\+{ord(character):04X} at position 2"):
        check_string("group_id", f"ab{character}")


def test_the_error_names_the_path_of_the_field() -> None:
    evaluation = EvaluationRequest(
        name="x", version=0, versions=[], reward_mean=0.0, rollouts=1, parts={"a" * 257: 1.0}
    )
    for request, path in (
        (TicketRequest(producer="a\n"), "producer"),
        (PolicyRequest(epoch=1, version=0, weights_uri="x" * (LONGEST_URI_BYTES + 1)), "weights_uri"),
        (evaluation, "parts key"),
    ):
        with pytest.raises(Invalid) as caught:
            check_strings(request)
        assert caught.value.name == path
