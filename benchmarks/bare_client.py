"""Client that sends the generator's requests to an engine and drops the answers.

    python benchmarks/bare_client.py http://127.0.0.1:8000 /v1/completions --client aiohttp --requests 1000

Prints the processor time of one request in seconds. The generator uses `aiohttp`. `httpx` has one client per
connection, because a pool of many costs more. `--tokenizer` also decodes answers: JSON, and token ids to text.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import httpx
import msgspec
import uvloop

from replaybuf.generator.engines.vllm import COMPLETIONS, _Completion, _Tokens
from replaybuf.wire.text.model_tokenizer import Tokenizer

WARM = 64
Ask = Callable[[str, bytes], Awaitable[bytes]]
Use = Callable[[bytes], object]
HEADERS = {"content-type": "application/json"}


def body(group_size: int, tokens: int) -> bytes:
    """Build a request of the size of the generator's."""
    sampling = {"n": group_size, "max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "top_p": 1.0, "top_k": -1}
    return msgspec.json.encode({"model": "null", "token_ids": list(range(64)), "sampling_params": sampling})


def dropped(answer: bytes) -> int:
    """Ignore an answer."""
    return len(answer)


def decoding(tokenizer: Path, path: str) -> Use:
    """Decode an answer and its texts as the generator does."""
    texts = Tokenizer(tokenizer)
    shape: type[_Completion | _Tokens] = _Completion if path == COMPLETIONS else _Tokens

    def decoded(answer: bytes) -> list[str]:
        choices = msgspec.json.decode(answer, type=shape).choices
        return texts.decode([choice.token_ids or [] for choice in choices])

    return decoded


async def by_aiohttp(url: str, content: bytes, use: Use, requests: int, inflight: int) -> float:
    """Send requests through one session."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def ask(url: str, content: bytes) -> bytes:
            async with session.post(url, data=content, headers=HEADERS) as response:
                return await response.read()

        return await spent_s(ask, url, content, use, requests, inflight)


async def by_httpx(url: str, content: bytes, use: Use, requests: int, inflight: int) -> float:
    """Send requests through one client per connection."""
    idle: list[httpx.AsyncClient] = []

    async def ask(url: str, content: bytes) -> bytes:
        client = idle.pop() if idle else httpx.AsyncClient(timeout=None)
        reply = await client.post(url, content=content, headers=HEADERS)
        idle.append(client)
        return reply.content

    took_s = await spent_s(ask, url, content, use, requests, inflight)
    for client in idle:
        await client.aclose()
    return took_s


CLIENTS = {"aiohttp": by_aiohttp, "httpx": by_httpx}


async def spent_s(ask: Ask, url: str, content: bytes, use: Use, requests: int, inflight: int) -> float:
    """Return the processor seconds per request after the warm-up."""

    async def several(count: int) -> None:
        for _ in range(count):
            use(await ask(url, content))

    async def all_of(count: int) -> None:
        await asyncio.gather(*(several(count // inflight) for _ in range(inflight)))

    await all_of(max(WARM, inflight))
    begun_s = time.process_time()
    await all_of(requests)
    return (time.process_time() - begun_s) / (requests // inflight * inflight)


def main() -> None:
    """Send the requests and print the cost of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("path")
    parser.add_argument("--client", choices=CLIENTS, default="aiohttp")
    parser.add_argument("--tokenizer", type=Path, help="folder; answers are decoded")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--inflight", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    content = body(arguments.group_size, arguments.tokens)
    use = decoding(arguments.tokenizer, arguments.path) if arguments.tokenizer else dropped
    asking = CLIENTS[arguments.client](
        arguments.engine + arguments.path, content, use, arguments.requests, arguments.inflight
    )
    print(uvloop.run(asking))


if __name__ == "__main__":
    main()
