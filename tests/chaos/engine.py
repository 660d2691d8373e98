"""Engine double as a process: `python -m tests.chaos.engine`.

Prints `listening on URL`. Its weights always have the published version of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from replaybuf.client.client import AsyncClient
from replaybuf.errors import ReplaybufError
from tests.chaos.calling import TIMEOUT_S
from tests.generator.doubles import EngineDouble


class Loaded(EngineDouble):
    """Engine with the published version: a trainer loads engines before it publishes a version."""

    def __init__(self, client: AsyncClient) -> None:
        super().__init__()
        self._client = client
        self.always = self._answer

    async def _load(self) -> None:
        with contextlib.suppress(ReplaybufError):  # the buffer is away: the weights stay loaded
            self.version = (await self._client.get_policy()).version

    async def _answer(self, request: dict[str, Any]) -> None:
        self.calls.clear()
        self.requests.clear()
        await self._load()

    async def _weight_info(self, request: Request) -> Response:
        await self._load()
        return await super()._weight_info(request)


async def serve(url: str, run: str) -> None:
    """Answer until the end."""
    async with AsyncClient(url, run, timeout_s=TIMEOUT_S) as client, Loaded(client).up() as engine:
        print(f"listening on {engine.url}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.url, options.run))


if __name__ == "__main__":
    main()
