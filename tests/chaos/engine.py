"""The engine double as a process: `python -m tests.chaos.engine`.

Prints `listening on URL`. It follows the published version of a run, as engines do that a trainer loads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

from replaybuf.client import AsyncClient
from replaybuf.errors import ReplaybufError
from tests.chaos.calling import TIMEOUT_S
from tests.generator.doubles import EngineDouble


async def serve(url: str, run: str) -> None:
    """Answer until the end."""
    async with EngineDouble().up() as engine, AsyncClient(url, run, timeout_s=TIMEOUT_S) as client:
        print(f"listening on {engine.url}", flush=True)
        while True:
            engine.calls.clear()
            engine.requests.clear()
            with contextlib.suppress(ReplaybufError):  # the buffer is away: the weights stay loaded
                engine.version = (await client.get_policy()).version
            await asyncio.sleep(0.05)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    given = parser.parse_args()
    asyncio.run(serve(given.url, given.run))


if __name__ == "__main__":
    main()
