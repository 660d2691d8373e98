"""replaybuf: a replay-buffer database for asynchronous reinforcement learning of language models.

`Client` and `AsyncClient` talk to a service; `replaybuf.strategy` is what a strategy plug-in builds on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.client.client import AsyncClient, Client

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: a strategy plug-in that imports replaybuf.strategy needs no HTTP library.
    if name in ("AsyncClient", "Client"):
        from replaybuf.client import client

        return getattr(client, name)
    raise AttributeError(f"module 'replaybuf' has no attribute {name!r}")
