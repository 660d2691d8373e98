"""The command `replaybuf config schema`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from cyclopts import Parameter

from replaybuf.launch.sections import file_schema


def schema(
    *, json: Annotated[bool, Parameter(negative="", help="Print JSON; the schema has no other form.")] = True
) -> None:
    """Print the JSON Schema of the file of "replaybuf up", with a description of every key."""
    del json
    print(msgspec.json.format(msgspec.json.encode(file_schema())).decode())
