"""Options of strategies and filters: frozen structs, judged when a run is configured, described with their ranges."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, TypeVar

import msgspec
import msgspec.inspect

from replaybuf.errors import Invalid

REQUIRED = "required"
"""What is told for the default of an option that has none."""
_UNSET = "unset"
_UNTOLD = 1e9
"""Bounds from here on only keep numbers within their type; a message tells them when they are crossed."""


class StrategyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a strategy's options: immutable, unknown names refused."""


OptionsT = TypeVar("OptionsT", bound=StrategyOptions)


def contradiction(option: str, value: Any, needed: str, why: str) -> Invalid:
    """Build the error of an option that another one contradicts: what is `needed` of its value, and why."""
    return Invalid(f"{option} is {json.dumps(value)}; {why}; needed: {needed}", name=option, value=value, bound=needed)


class OptionHelp(NamedTuple):
    """One option: `accepts`, as in `int >= 0 or null`; `default` as JSON, `required` or `unset`."""

    name: str
    accepts: str
    default: str


def describe_options(shape: type[StrategyOptions]) -> list[OptionHelp]:
    """Describe every option from the struct alone."""
    return [
        OptionHelp(field.encode_name, _range(msgspec.inspect.type_info(field.type)), _default(field))
        for field in msgspec.structs.fields(shape)
    ]


def option_ranges(shape: type[StrategyOptions]) -> dict[str, str]:
    """Say of every option what it may be and its default, as in `int >= 0 or null (default 4)`."""
    return {
        name: accepts if default in (REQUIRED, _UNSET) else f"{accepts} (default {default})"
        for name, accepts, default in describe_options(shape)
    }


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return REQUIRED
    made = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return _UNSET if made is msgspec.UNSET else _json(made)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _range(kind: msgspec.inspect.Type) -> str:
    """Render one type of an option with its bounds."""
    match kind:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            name = "int" if isinstance(kind, msgspec.inspect.IntType) else "number"
            bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
            told = [f"{sign} {bound}" for sign, bound in bounds if bound is not None and abs(bound) < _UNTOLD]
            return f"{name} {' and '.join(told)}".strip()
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
    """Say whether all numbers in a value from JSON are finite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def check_options(name: str, options: dict[str, Any], shape: type[OptionsT], kind: str = "strategy") -> OptionsT:
    """Build the options of a strategy or filter.

    Raises `Invalid` naming the option and listing the valid ones with their ranges; whatever the struct itself refuses
    in `__post_init__` (options that contradict each other) is raised as it is. No number may be NaN or infinite:
    nothing compares with the one, the other as a bound lets everything or nothing through, and JSON has neither.
    """
    for option, value in options.items():
        if not _is_finite(value):
            raise contradiction(f"{kind}.options.{option}", value, "finite numbers", f"{kind} {name!r} bounds by it")
    try:
        return msgspec.convert(options, shape)
    except msgspec.ValidationError as error:
        valid = "; ".join(f"{option}: {told}" for option, told in option_ranges(shape).items())
        raise Invalid(
            f"options of {kind} {name!r}: {error}; valid options: {valid or 'none'}",
            name=f"{kind}.options",
            value=options,
            bound=valid,
        ) from None


def repr_without(options: msgspec.Struct, secret: str) -> str:
    """Show options as `repr` does, but for the field that may hold a password or a token."""
    shown = ", ".join(f"{name}={getattr(options, name)!r}" for name in options.__struct_fields__ if name != secret)
    return f"{type(options).__name__}({shown})"
