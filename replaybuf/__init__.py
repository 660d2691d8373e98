"""replaybuf: a replay-buffer database for asynchronous reinforcement learning of language models.

The names here are what producers and trainers need. Plug-ins build on `replaybuf.strategy` and test with
`replaybuf.testing`; all errors are in `replaybuf.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from replaybuf.version import __version__

if TYPE_CHECKING:
    from replaybuf.client import AsyncBatchReader, AsyncClient, BatchReader, Client, ReaderOptions, TrainerSession
    from replaybuf.errors import ReplaybufError
    from replaybuf.kernel.strategy.contract import Strategy
    from replaybuf.wire.answer.run_status import RunStatus
    from replaybuf.wire.contract import WaitingAnswer
    from replaybuf.wire.group import Group, GroupJson, RolloutJson, group_from_json

__all__ = [
    "AsyncBatchReader",
    "AsyncClient",
    "BatchReader",
    "Client",
    "Group",
    "GroupJson",
    "ReaderOptions",
    "ReplaybufError",
    "RolloutJson",
    "RunStatus",
    "Strategy",
    "TrainerSession",
    "WaitingAnswer",
    "__version__",
    "group_from_json",
]

_MODULES = {
    "replaybuf.client": ("AsyncBatchReader", "AsyncClient", "BatchReader", "Client", "ReaderOptions", "TrainerSession"),
    "replaybuf.errors": ("ReplaybufError",),
    "replaybuf.kernel.strategy.contract": ("Strategy",),
    "replaybuf.wire.contract": ("WaitingAnswer",),
    "replaybuf.wire.group": ("Group", "GroupJson", "RolloutJson", "group_from_json"),
    "replaybuf.wire.answer.run_status": ("RunStatus",),
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Loaded at first use: a plug-in that imports replaybuf.strategy needs no HTTP library.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'replaybuf' has no attribute {name!r}")
