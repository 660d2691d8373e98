"""Types of options that commands share: several values as one JSON object, and an address to listen on.

`--lora-options '{"alpha": 32}'` is the table `lora_options = { alpha = 32 }` in TOML files. A flag replaces all keys of
the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from cyclopts import Parameter, Token

from replaybuf.errors import Invalid
from replaybuf.wire.decoding import prepared

GroupT = TypeVar("GroupT", bound="OptionGroup")
Positive = Annotated[int, msgspec.Meta(ge=1)]
_LARGEST_PORT = 65535


class OptionGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the values of one option. Each field has a description (`msgspec.Meta`), which the help shows."""


def about(text: str, **bounds: Any) -> msgspec.Meta:
    """Return the description of a field of a group, with its bounds."""
    return msgspec.Meta(description=text, **bounds)


def group_option(shape: type[GroupT]) -> type[GroupT]:
    """Let commands read this group from JSON. The help has the first paragraph of its docstring, and its keys."""
    fields = msgspec.structs.fields(shape)
    summary = (shape.__doc__ or "").partition("\n\n")[0]
    text = "\n".join([summary, *map(_described, fields)])
    return json_option(text, shape, [field.name for field in fields])(shape)


def json_option(text: str, shape: Any = dict[str, Any], keys: Sequence[str] | None = None) -> Parameter:
    """Return how a command reads an option of this shape from JSON; `keys` None = any keys.

    Reading raises `Invalid` with the option and its text, what is wrong, and the valid keys.
    """

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        name, value = tokens[0].keyword or "", tokens[0].value
        try:
            return msgspec.json.decode(value, type=prepared(shape))
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            raise invalid_group(name, value, error, keys) from error

    return Parameter(converter=convert, accepts_keys=False, n_tokens=1, metavar="JSON", show_default=False, help=text)


def invalid_group(name: str, value: object, cause: Exception, keys: Sequence[str] | None) -> Invalid:
    """Describe an option that is not a JSON object with these keys; None = any keys."""
    needed = "" if keys is None else f" with the keys {', '.join(keys)}" if keys else " without keys"
    detail = f"{name} is {value!r}: {cause}; it must be a JSON object{needed}"
    return Invalid(detail, name=name, value=value, bound=keys)


def _described(field: msgspec.structs.FieldInfo) -> str:
    """Return a key with its default and its description."""
    default = json.dumps(field.default) if isinstance(field.default, (bool, int, float, str)) else ""
    note = "required" if field.required else default
    texts = (meta.description for meta in field.type.__metadata__ if isinstance(meta, msgspec.Meta))
    return f"{field.name}{note and f' ({note})'}: {next(filter(None, texts))}"


def _listen_address(_: Any, tokens: Sequence[Token]) -> ListenAddress:
    """Read HOST:PORT, :PORT or PORT; without a host it is loopback. Raises `Invalid`."""
    name, text = tokens[0].keyword or "", tokens[0].value
    match = re.fullmatch(r"(?:([^/]*):)?([0-9]{1,5})", text)
    if match is None or int(match[2]) > _LARGEST_PORT:
        bound = f"HOST:PORT or PORT, with a port from 0 to {_LARGEST_PORT}"
        raise Invalid(f"{name} is {text!r}; it must be {bound}", name=name, value=text, bound=bound)
    return ListenAddress((match[1] or "127.0.0.1").strip("[]"), int(match[2]))


@Parameter(converter=_listen_address, accepts_keys=False, n_tokens=1, metavar="HOST:PORT")
class ListenAddress(NamedTuple):
    """Host and port to listen on; port 0 takes a free one."""

    host: str
    port: int
