"""Bounded strings of the contract: ids, names, reasons and addresses. The one check of all of them.

A field of a request has one of these types, or a list of allowed words, or a pattern. `check_strings` finds the fields
of a struct by their type. The contents of a group, which may also come as a frame, are checked by `group_check`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import msgspec.inspect as inspect
from msgspec import Meta

from replaybuf.errors import Invalid

LONGEST_NAME_BYTES = 256
LONGEST_METRIC_BYTES = 64
LONGEST_REASON_BYTES = 1024
LONGEST_URI_BYTES = 4096
REASON_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""A reason of a plug-in, which is also a label of a metric."""
_BYTES, _LINES = "most_bytes", "lines"
_BREAKS = "\n\t"
_LARGEST_CHARACTER_BYTES = 4


def _bounded(most_bytes: int) -> Meta:
    return Meta(
        description=f"Printable characters, at most {most_bytes} bytes as UTF-8.",
        extra_json_schema={"maxLength": most_bytes, "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"},
        extra={_BYTES: most_bytes},
    )


Name = Annotated[str, _bounded(LONGEST_NAME_BYTES)]
"""An id or a name."""
MetricName = Annotated[str, _bounded(LONGEST_METRIC_BYTES)]
"""The name of a metric that a trainer reports."""
Uri = Annotated[str, _bounded(LONGEST_URI_BYTES)]


def lines(most_bytes: int) -> Meta:
    """Bound a text of several lines."""
    return Meta(
        description=f"Printable characters, line breaks and tabs, at most {most_bytes} bytes as UTF-8.",
        extra_json_schema={"maxLength": most_bytes, "pattern": "^[^\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f]*$"},
        extra={_BYTES: most_bytes, _LINES: True},
    )


def is_shown(character: str) -> bool:
    """Return whether a text of several lines may have this character."""
    return character in _BREAKS or character.isprintable()


def check_string(name: str, value: str, most_bytes: int = LONGEST_NAME_BYTES, *, breaks: bool = False) -> None:
    """Raise `Invalid` if a string has a character that is not printable, or more than `most_bytes` bytes as UTF-8.

    `breaks`: line breaks and tabs are allowed.
    """
    if len(value) * _LARGEST_CHARACTER_BYTES <= most_bytes and value.isprintable():
        return
    # Lone halves of surrogate pairs are not printable, so what follows can be encoded.
    for position, character in enumerate(value):
        if not (character.isprintable() or (breaks and character in _BREAKS)):
            detail = f"{name} has the character U+{ord(character):04X} at position {position}; use printable characters"
            raise Invalid(detail, name=name, value=value, bound="printable")
    size = len(value.encode())
    if size > most_bytes:
        raise Invalid(f"{name} has {size} bytes; the maximum is {most_bytes}", name=name, value=size, bound=most_bytes)


def fit_together(values: Iterable[str | None], most_bytes: int = LONGEST_NAME_BYTES) -> bool:
    """Return whether `check_string` accepts all of them joined, and so each: most groups need no more calls."""
    text = "".join(filter(None, values))
    return text.isprintable() and len(text) <= (
        most_bytes if text.isascii() else most_bytes // _LARGEST_CHARACTER_BYTES
    )


def check_strings(request: msgspec.Struct, path: str = "") -> None:
    """Check the bounded strings of a request and of the structs inside. Raises `Invalid` with the path of the field."""
    for name, kind in _bounded_fields(type(request)):
        _check(kind, getattr(request, name), path + name)


@functools.cache
def _bounded_fields(shape: type[msgspec.Struct]) -> list[tuple[str, inspect.Type]]:
    """List the fields that hold bounded strings, with their types."""
    described = inspect.type_info(shape)
    fields = described.fields if isinstance(described, inspect.StructType) else ()
    return [(field.name, field.type) for field in fields if _holds_bounded(field.type)]


def _holds_bounded(kind: inspect.Type) -> bool:
    match kind:
        case inspect.Metadata():
            return bool(kind.extra and _BYTES in kind.extra) or _holds_bounded(kind.type)
        case inspect.UnionType():
            return any(map(_holds_bounded, kind.types))
        case inspect.ListType():
            return _holds_bounded(kind.item_type)
        case inspect.DictType():
            return _holds_bounded(kind.key_type) or _holds_bounded(kind.value_type)
        case inspect.StructType():
            return bool(_bounded_fields(kind.cls))
    return False


def _check(kind: inspect.Type, value: Any, path: str) -> None:
    match kind:
        case inspect.Metadata() if kind.extra and _BYTES in kind.extra and isinstance(value, str):
            check_string(path, value, kind.extra[_BYTES], breaks=kind.extra.get(_LINES, False))
        case inspect.Metadata():
            _check(kind.type, value, path)
        case inspect.UnionType():
            for part in kind.types:  # at most one of them is of the value's type
                _check(part, value, path)
        case inspect.ListType() if isinstance(value, list):
            for position, item in enumerate(value):
                _check(kind.item_type, item, f"{path}[{position}]")
        case inspect.DictType() if isinstance(value, dict):
            for key, item in value.items():
                _check(kind.key_type, key, f"{path} key")
                _check(kind.value_type, item, f"{path}.{key}")
        case inspect.StructType() if isinstance(value, kind.cls):
            check_strings(value, f"{path}.")
