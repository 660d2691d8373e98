"""Options of strategies and filters: base struct, check and description."""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any, NamedTuple, TypeVar

import msgspec
import msgspec.inspect

from replaybuf.errors import Invalid
from replaybuf.wire.decoding import prepared

REQUIRED = "required"
"""Default of an option that has none."""
_UNSET = "unset"
KEPT_SHAPES = 256
"""Descriptions of options that are kept: a takeover of many runs builds the same plug-ins again and again."""
_TYPE_BOUND = 1e9
"""Descriptions leave out bounds from here on: they only keep numbers within their type."""


class StrategyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the options of a strategy or filter: immutable; unknown names are errors.

    `requires`: columns that a group needs before the plug-in may see it, besides those that the plug-in declares.
    """

    requires: list[str] | msgspec.UnsetType = msgspec.UNSET


OptionsT = TypeVar("OptionsT", bound=StrategyOptions)
_OptionsT = TypeVar("_OptionsT", bound=msgspec.Struct)


def contradiction(option: str, value: Any, needed: str, why: str) -> Invalid:
    """Build the error of an option that contradicts another; `needed` is the value it must have."""
    return Invalid(f"{option} is {json.dumps(value)}; {why}; needed: {needed}", name=option, value=value, bound=needed)


class OptionHelp(NamedTuple):
    """Description of one option: `accepts`, as in `int >= 0 or null`; `default` as JSON, `required` or `unset`.

    `meaning`: the description of its type (`msgspec.Meta`), or empty.
    """

    name: str
    accepts: str
    default: str
    meaning: str = ""


@functools.lru_cache(maxsize=KEPT_SHAPES)
def describe_options(shape: type[msgspec.Struct]) -> tuple[OptionHelp, ...]:
    """Describe every option of a struct, except those that all plug-ins have."""
    return tuple(
        OptionHelp(
            field.encode_name, _range(msgspec.inspect.type_info(field.type)), _default(field), meaning_of(field.type)
        )
        for field in msgspec.structs.fields(shape)
        if field.name not in StrategyOptions.__struct_fields__
    )


def option_ranges(shape: type[msgspec.Struct]) -> dict[str, str]:
    """Return the range and default of every option, as in `int >= 0 or null (default 4)`."""
    return {
        name: accepts if default in (REQUIRED, _UNSET) else f"{accepts} (default {default})"
        for name, accepts, default, _ in describe_options(shape)
    }


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return REQUIRED
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return _UNSET if default is msgspec.UNSET else msgspec.json.encode(default).decode()


def meaning_of(hint: Any) -> str:
    """Return the last description of a type (`msgspec.Meta`); empty without one."""
    metas = (meta for meta in reversed(getattr(hint, "__metadata__", ())) if isinstance(meta, msgspec.Meta))
    return next((meta.description for meta in metas if meta.description), "")


def _range(kind: msgspec.inspect.Type) -> str:
    """Return a type as text with its bounds."""
    match kind:
        case msgspec.inspect.Metadata():
            return _range(kind.type)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            name = "int" if isinstance(kind, msgspec.inspect.IntType) else "number"
            bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
            shown = [f"{sign} {bound}" for sign, bound in bounds if bound is not None and abs(bound) < _TYPE_BOUND]
            return f"{name} {' and '.join(shown)}".strip()
        case msgspec.inspect.LiteralType():
            return " | ".join(str(value) for value in kind.values)
        case msgspec.inspect.UnionType():
            return " or ".join(_range(part) for part in kind.types)
        case msgspec.inspect.NoneType():
            return "null"
        case msgspec.inspect.BoolType():
            return "true | false"
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.DictType():
            return f"{{{_range(kind.key_type)}: {_range(kind.value_type)}}}"
        case msgspec.inspect.ListType():
            return f"[{_range(kind.item_type)}, ...]"
    return type(kind).__name__.removesuffix("Type").lower()


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in a value from JSON are finite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def check_options(name: str, options: dict[str, Any], shape: type[_OptionsT], kind: str = "strategy") -> _OptionsT:
    """Build the options of a plug-in. Raises `Invalid` with the option, the reason and the valid values.

    All missing options are named at once. NaN and infinity are invalid, because neither can bound anything. Errors of
    the struct's `__post_init__` (options that contradict each other) pass through.
    """
    for option, value in options.items():
        if not _is_finite(value):
            raise contradiction(f"{kind}.options.{option}", value, "finite numbers", f"{kind} {name!r} bounds by it")
    valid = option_ranges(shape)
    required = [option.name for option in describe_options(shape) if option.default == REQUIRED]
    missing = [option for option in required if option not in options]
    if missing:
        needed = "; ".join(f"{option}: {valid[option]}" for option in missing)
        raise _invalid(name, kind, options, f"missing required options: {needed}", needed)
    try:
        return msgspec.convert(options, prepared(shape))
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        option = re.split(r"[.\[`]", path)[0]
        if option in valid:
            bound = f"{option}: {valid[option]}"
            reason = f"{option} is {json.dumps(options[option])}; {reason}"
        else:
            bound = "; ".join(f"{option}: {accepts}" for option, accepts in valid.items()) or "none"
        raise _invalid(name, kind, options, f"{reason}; valid options: {bound}", bound) from None


def _invalid(name: str, kind: str, options: dict[str, Any], detail: str, bound: str) -> Invalid:
    return Invalid(f"options of {kind} {name!r}: {detail}", name=f"{kind}.options", value=options, bound=bound)
