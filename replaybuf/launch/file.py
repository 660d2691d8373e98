"""Read and decode the file of `replaybuf up`: names of keys, types, bounds, missing keys.

One pass decodes all sections and collects all problems: a person corrects a file once, not once per problem.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from replaybuf.errors import Invalid
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf.launch.sections import MINE, Key, RunFile, RunSection, Section, keys_of
from replaybuf.wire.config import BatchSpec

SHOWN = 60
"""Characters of a wrong value in a message."""
_WRONG = object()
"""Decoded value of a wrong value."""
_REPLACED = {"run": RunSection(name="unknown", batch=BatchSpec()), "trainer": MINE}
"""Values of sections that cannot be decoded, so that the others can still be checked."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedFile:
    """The sections of a file without their wrong values; `broken` are the keys of the file that have `problems`."""

    sections: RunFile
    problems: list[str]
    broken: set[str]


def read_file(path: Path) -> dict[str, Any]:
    """Read the tables of a file. Raises `Invalid` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(read_bounded(path, CONFIG_BYTES).decode())
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise Invalid(f"{path} cannot be read: {cause}", name="file", value=str(path)) from error


def decode_file(tables: Mapping[str, Any]) -> DecodedFile:
    """Decode the tables of a file, and list what is wrong with single keys, one line each."""
    decoder = _Decoder()
    sections = RunFile(**{**_REPLACED, **decoder.values("", tables, RunFile)})
    return DecodedFile(sections, decoder.problems, decoder.broken)


class _Decoder:
    """Decodes tables key by key, because msgspec stops at the first problem."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.broken: set[str] = set()

    def values(self, where: str, table: Mapping[str, Any], shape: type[msgspec.Struct]) -> dict[str, Any]:
        """Return the fields of a struct that a table has, without wrong values."""
        keys, values = keys_of(shape), {}
        follows = shape.follows if issubclass(shape, Section) else {}
        for key, value in table.items():
            place = f"{where}.{key}" if where else key
            if key in keys:
                if (decoded := self._value(place, value, keys[key])) is not _WRONG:
                    values[key] = decoded
            elif key in follows:
                self._reject(place, f" cannot be set: {follows[key]}")
            else:
                near = difflib.get_close_matches(key, keys, 1)
                hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(keys))}"
                self._reject(place, f" is not a key of this file; {hint}")
        for key, known in keys.items():
            if known.required and key not in table:
                text = known.description.split(". ")[0].rstrip(".")
                self._reject(f"{where}.{key}" if where else key, f" is missing: {text}")
        if issubclass(shape, Section):
            fields = {key: values.pop(key) for key in shape.__struct_fields__ if key in values}
            # Options stay as the file has them: 1 instead of 1.0, as in the command that a person reads.
            return {**fields, "options": {key: table[key] for key in values}}
        return values

    def _struct(self, where: str, table: Mapping[str, Any], shape: type[StructT]) -> StructT | object:
        values = self.values(where, table, shape)
        if any(field.required and field.name not in values for field in msgspec.structs.fields(shape)):
            return _WRONG
        try:
            return shape(**values)
        except Invalid as error:  # values that contradict each other
            self._reject(where, f": {error.detail}")
            return _WRONG

    def _value(self, where: str, value: Any, key: Key) -> Any:
        shape, inner = _struct_in(key.hint), _items_of(key.hint)
        if isinstance(value, dict) and shape is not None:
            return self._struct(where, value, shape)
        if isinstance(value, (dict, list)) and inner is not None and _struct_in(inner) is not None:
            item = dataclasses.replace(key, hint=inner)
            pairs = value.items() if isinstance(value, dict) else enumerate(value, 1)
            items = {name: self._value(f"{where}[{name}]", part, item) for name, part in pairs}
            sound = {name: part for name, part in items.items() if part is not _WRONG}
            return sound if isinstance(value, dict) else list(sound.values())
        try:
            return msgspec.convert(value, key.hint)
        except msgspec.ValidationError as error:
            text = repr(value)
            shown = "a wrong value" if key.secret else text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
            self._reject(where, f" is {shown}: {str(error)[:1].lower()}{str(error)[1:]}")
            return _WRONG

    def _reject(self, where: str, problem: str) -> None:
        self.problems.append(where + problem)
        self.broken.add(re.split(r"[.\[]", where, maxsplit=1)[0])


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, without annotations."""
    if get_origin(hint) is Annotated:
        yield from _parts(get_args(hint)[0])
    elif get_origin(hint) in (list, dict, tuple) or not get_args(hint):
        yield hint
    else:
        for part in get_args(hint):
            yield from _parts(part)


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a table of this type is; None if it is none."""
    return next((part for part in _parts(hint) if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def _items_of(hint: Any) -> Any:
    """Return the type of the items of a list or of the values of a table; None for other types."""
    return next((get_args(part)[-1] for part in _parts(hint) if get_origin(part) in (list, dict)), None)
