"""Read the file of `replaybuf up` and check each value by itself: names of keys, types, bounds, missing keys.

All problems are collected: a person corrects a file once, not once per problem.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec

from replaybuf.errors import Invalid
from replaybuf.launch.options import options_of
from replaybuf.launch.sections import COMMANDS, FOLLOWS, file_shape
from replaybuf.wire.files import CONFIG_BYTES, read_bounded

SHOWN = 60
"""Characters of a wrong value in a message."""


def read_file(path: Path) -> dict[str, Any]:
    """Read the tables of a file. Raises `Invalid` if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(read_bounded(path, CONFIG_BYTES).decode())
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise Invalid(f"{path} cannot be read: {cause}", name="file", value=str(path)) from error


def problems_of(tables: dict[str, Any]) -> list[str]:
    """List what is wrong with single keys of a file, one line each."""
    return list(_table_problems("", tables, file_shape()))


def _table_problems(where: str, table: Mapping[str, Any], shape: type[msgspec.Struct]) -> Iterator[str]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(shape)}
    for key, value in table.items():
        place = f"{where}.{key}" if where else key
        if key not in fields:
            yield _unknown(where, key, list(fields))
        else:
            yield from _value_problems(place, value, fields[key].type)
    for key, field in fields.items():
        if field.required and key not in table:
            yield f"{f'{where}.{key}' if where else key} is missing: {_description(field.type)}"


def _value_problems(where: str, value: Any, hint: Any) -> Iterator[str]:
    """Check one value; tables and lists of tables key by key, because msgspec stops at the first problem."""
    shape, inner = _struct_in(hint), _items_of(hint)
    if isinstance(value, dict) and shape is not None:
        yield from _table_problems(where, value, shape)
    elif isinstance(value, (dict, list)) and inner is not None and _struct_in(inner) is not None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value, 1)
        for key, item in pairs:
            yield from _value_problems(f"{where}[{key}]", item, inner)
    else:
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            yield f"{where} is {_shown(where, value)}: {str(error)[:1].lower()}{str(error)[1:]}"


def _unknown(where: str, key: str, known: list[str]) -> str:
    section = where.partition("[")[0]
    if key in FOLLOWS.get(section, {}):
        return f"{where}.{key} cannot be set: {FOLLOWS[section][key]}"
    near = difflib.get_close_matches(key, known, 1)
    keys = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"{f'{where}.{key}' if where else key} is not a key of this file; {keys}"


def _shown(where: str, value: Any) -> str:
    """Return the value for a message, unless it is a secret."""
    section, _, key = where.partition(".")
    command = COMMANDS.get(section.partition("[")[0])
    option = options_of(command).get(key) if command else None
    text = repr(value)
    return "a wrong value" if option and option.secret else text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


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


def _description(hint: Any) -> str:
    """Return the description of a type, the words before the first stop."""
    if get_origin(hint) is Annotated:
        texts = [meta.description for meta in get_args(hint)[1:] if isinstance(meta, msgspec.Meta) and meta.description]
        if texts:
            return texts[-1].split(". ")[0].rstrip(".")
    return "it has no default"
