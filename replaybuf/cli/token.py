"""The command `replaybuf token`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from replaybuf.service.http.auth import new_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokenOptions:
    """Role and name of a new token, and the file that stores it."""

    role: str
    """Role of the token: producer, trainer, reader or operator."""
    name: str
    """Name of the token's owner; log and error messages show it."""
    tokens_file: Path
    """File to add the token's hash to. "replaybuf serve --tokens-file" reads the file at the start."""


def new(options: Annotated[NewTokenOptions, Parameter(name="*")]) -> None:
    """Create a token, print it once and store its hash."""
    print(new_token(options.role, options.name, options.tokens_file))
