"""Inference server that answers every request at once with the same completions.

    python benchmarks/null_engine.py --rollouts 8 --tokens 256

It has both calls of vLLM 0.32 and prints "listening on http://127.0.0.1:PORT".
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import msgspec
import numpy as np
import uvloop

TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
VOCABULARY = 1000


def answers(rollouts: int, tokens: int, *, offers_tokens: bool) -> dict[bytes, bytes]:
    """Build the whole answer to each request by method and path."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (rollouts, tokens)).tolist()
    logprobs = (-rng.exponential(1.0, (rollouts, tokens))).tolist()
    spans = [{"version": "0", "start": 0, "end": tokens}]
    alike: dict[str, Any] = {"finish_reason": "length", "weight_versions": spans}
    by_tokens = [
        alike
        | {
            "index": i,
            "token_ids": ids[i],
            "logprobs": {
                "content": [
                    {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
                    for token, logprob in zip(ids[i], logprobs[i], strict=True)
                ]
            },
        }
        for i in range(rollouts)
    ]
    by_completions = [
        alike
        | {
            "index": i,
            "text": "",
            "token_ids": ids[i],
            "logprobs": {
                "token_logprobs": logprobs[i],
                "tokens": [f"token_id:{token}" for token in ids[i]],
                "top_logprobs": [{f"token_id:{t}": p} for t, p in zip(ids[i], logprobs[i], strict=True)],
                "text_offset": [0] * tokens,
            },
        }
        for i in range(rollouts)
    ]
    there: tuple[bytes, Any] = (b"405 Method Not Allowed", {}) if offers_tokens else (b"404 Not Found", {})
    made: dict[str, tuple[bytes, Any]] = {
        f"GET {TOKENS}": there,
        f"POST {TOKENS}": (b"200 OK", {"choices": by_tokens}),
        f"POST {COMPLETIONS}": (b"200 OK", {"model": "null", "choices": by_completions}),
        "GET /v1/models": (b"200 OK", {"data": [{"id": "null", "max_model_len": 1 << 20}]}),
        "GET /weight_info": (b"200 OK", {"weight_version": "0"}),
        "GET /health": (b"200 OK", {}),
    }
    return {name.encode(): _response(status, body) for name, (status, body) in made.items()}


def _response(status: bytes, body: Any) -> bytes:
    content = msgspec.json.encode(body)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(content))
    return head + content


class NullEngine(asyncio.Protocol):
    """One connection: requests one after another, each with its body in `content-length` bytes."""

    def __init__(self, by_name: dict[bytes, bytes], absent: bytes) -> None:
        self._by_name = by_name
        self._absent = absent
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, header, rest = head.partition(b"content-length:")
            whole = end + 4 + (int(rest.split(b"\r\n", 1)[0]) if header else 0)
            if len(self._buffer) < whole:
                return
            name = b" ".join(self._buffer.split(b" ", 2)[:2])
            self._buffer = self._buffer[whole:]
            self._transport.write(self._by_name.get(name, self._absent))


async def serve(by_name: dict[bytes, bytes]) -> None:
    """Serve on a free port until the process ends."""
    absent = _response(b"404 Not Found", {})
    server = await asyncio.get_running_loop().create_server(lambda: NullEngine(by_name, absent), "127.0.0.1", 0)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--completions", action="store_true", help=f"offer {COMPLETIONS} alone")
    arguments = parser.parse_args()
    uvloop.run(serve(answers(arguments.rollouts, arguments.tokens, offers_tokens=not arguments.completions)))


if __name__ == "__main__":
    main()
