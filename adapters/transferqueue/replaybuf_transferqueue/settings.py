"""Settings of the storage back end: `backend.Replaybuf` of TransferQueue's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from omegaconf import DictConfig, OmegaConf

from replaybuf.errors import Invalid
from replaybuf.wire.decoding import prepared

BACKEND = "Replaybuf"
URL_VARIABLE = "REPLAYBUF_TRANSFERQUEUE_URL"
T = TypeVar("T", bound=msgspec.Struct)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one store.

    - `url`: the Valkey or Redis; None = `$REPLAYBUF_TRANSFERQUEUE_URL`
    - `name`: name of the store; queues with different names share a server
    - `durability`: `strict` = a put returns when its bytes are on the server's disk; `relaxed` = without that wait
    - `keep_checkpoints`: how many of the newest checkpoints stay restorable
    - `pickle_fields`: fields whose values may be stored and read as pickle
    - `timeout_s`: how long a call waits for a server that is away
    - `session`: number of the session that TransferQueue's start began; 0 = not begun
    """

    url: str | None = None
    name: str = "transferqueue"
    durability: Literal["strict", "relaxed"] = "strict"
    keep_checkpoints: int = 2
    pickle_fields: tuple[str, ...] = ()
    timeout_s: float = 60.0
    session: int = 0

    def __post_init__(self) -> None:
        # TransferQueue replaces a checkpoint after the store has saved it: a crash between them leaves the older one.
        if self.keep_checkpoints < 2:
            message = f"keep_checkpoints is {self.keep_checkpoints}; the minimum is 2"
            raise Invalid(message, name="keep_checkpoints", value=self.keep_checkpoints, bound=2)
        if not self.name or any(sign in self.name for sign in "{} \n"):
            message = f"name is {self.name!r}; it needs a character, and none of them may be a brace or a space"
            raise Invalid(message, name="name", value=self.name)
        if not self.timeout_s > 0:
            raise Invalid(f"timeout_s is {self.timeout_s}; it must be above 0", name="timeout_s", value=self.timeout_s)
        if self.url is not None and urlsplit(self.url).password:
            # TransferQueue logs its configuration.
            raise Invalid(f"url has a password, and TransferQueue logs it; set ${URL_VARIABLE} instead", name="url")

    @property
    def address(self) -> str:
        """The URL to connect to. Raises `Invalid` if there is none."""
        address = self.url or os.environ.get(URL_VARIABLE)
        if not address:
            raise Invalid(f"no Valkey or Redis: set backend.{BACKEND}.url or ${URL_VARIABLE}", name="url")
        return address


def read_settings(config: Mapping[str, Any] | DictConfig) -> Settings:
    """Check the settings; raises `Invalid` that names a wrong one."""
    return convert(config, Settings, f"backend.{BACKEND}", ignored="client_name")


def convert(config: Mapping[str, Any] | DictConfig, kind: type[T], where: str, ignored: str | None = None) -> T:
    """Return the settings at `where` in a configuration. Raises `Invalid` for an unknown or a wrong one."""
    plain: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    try:
        return msgspec.convert({name: value for name, value in plain.items() if name != ignored}, prepared(kind))
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise Invalid(f"{where}: {error}; the settings are {known}", name=where) from error
