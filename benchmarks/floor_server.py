"""The least that a durable append needs: the reference of `floor.py`.

The same `rb_publish`, barrier, checksum, checks of layout and ranges, fold and file of known ends as the service, with
its own small protocols for HTTP and Redis. No tickets, tokens, plug-ins, limits, metrics, other calls or other runs.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import crc32c
import hiredis
import msgspec
import numpy as np
import uvloop

from replaybuf.kernel.rows.index import ENTRY, ENTRY_STRUCT, Index
from replaybuf.store import keys
from replaybuf.wire.frame import FrameHeader

RUN = "floor"
LINE_BYTES = 1024
_PREFIX = struct.Struct("<4sIQII")
_decode_header = msgspec.msgpack.Decoder(FrameHeader).decode
_encode = msgspec.msgpack.Encoder().encode
_least, _most = np.minimum.reduce, np.maximum.reduce
WAIT: tuple[Any, ...] = ("WAITAOF", 1, 0, 1000)


class Redis(asyncio.Protocol):
    """One connection to Redis; replies answer the commands in order."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[int, list[Any], asyncio.Future[list[Any]]]] = deque()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand replies to those who wait for them."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            count, replies, answer = self._waiting[0]
            replies.append(reply)
            if len(replies) == count:
                self._waiting.popleft()
                answer.set_result(replies)

    def send(self, pieces: list[Any], count: int) -> asyncio.Future[list[Any]]:
        """Send `count` packed commands; return their replies."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((count, [], answer))
        self._transport.writelines(pieces)
        return answer


class Floor:
    """Stores the frames of bodies."""

    def __init__(self, redis: Redis, folder: Path) -> None:
        self._redis = redis
        self._index = Index()
        self._stored = 0
        self._newest_key = ""
        self._file = os.open(folder / "floor.ends", os.O_WRONLY | os.O_CREAT)
        self._lock = asyncio.Lock()

    async def append(self, body: memoryview) -> bytes:
        """Store the frames of one body; return the answer when they are durable."""
        entries, names, pieces, arguments, payloads = [], [], [], [], []
        while body:
            length = struct.unpack_from("<Q", body, 8)[0]
            frame, body = body[:length], body[length:]
            header, values, lengths = _check(frame)
            payload = keys.payload(RUN, header.group_id or "")
            strings = _encode((header.group_id, header.prompt_id, header.adapter, payload, None, lengths, None))
            pieces += [b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(payload), payload.encode(), length), frame]
            pieces.append(b"\r\n$2\r\nEX\r\n$4\r\n3600\r\n")
            arguments += [header.group_id, "", values, strings, "", ""]
            payloads += ["", "", payload]
            entries.append(values)
            names.append(header.group_id)
        async with self._lock:
            first = [*keys.guarded(RUN), keys.deleted(RUN)]
            guard = ["", 0, "", self._stored, self._newest_key, 0, ""]
            words: tuple[Any, ...] = (
                "FCALL",
                "rb_publish",
                len(first) + len(payloads),
                *first,
                *payloads,
                *guard,
                *arguments,
            )
            pieces += [hiredis.pack_command(words), hiredis.pack_command(WAIT)]
            *_, reply, durable = await self._redis.send(pieces, len(entries) + 2)
            if reply[0] != b"ok" or not durable[0]:
                raise RuntimeError(f"not stored: {reply!r}")
            outcomes, numbers = reply[1][::2], reply[1][1::2]
            if set(outcomes) != {1}:
                raise RuntimeError(f"repeated: {reply!r}")
            self._index.insert(np.array(numbers), np.frombuffer(b"".join(entries), ENTRY))
            self._stored, self._newest_key = numbers[-1], payloads[-1]
            line = msgspec.json.encode([0, self._stored, self._newest_key]).ljust(LINE_BYTES)
            os.pwrite(self._file, line, self._stored % 2 * LINE_BYTES)
        return msgspec.json.encode({"results": [{"group_id": name, "status": "stored"} for name in names]})


def _check(frame: memoryview) -> tuple[FrameHeader, bytes, bytes]:
    """Check one frame; return its header, its index entry and the tokens of its rollouts."""
    magic, crc, _, _, header_length = _PREFIX.unpack_from(frame)
    if magic != b"RBF1" or crc32c.crc32c(frame[8:]) != crc:
        raise RuntimeError("the frame is broken")
    header = _decode_header(frame[_PREFIX.size : _PREFIX.size + header_length])
    places = header.columns

    def column(name: str, dtype: str) -> Any:
        place = places[name]
        return np.frombuffer(frame, dtype, place.length // np.dtype(dtype).itemsize, place.offset)

    prompts, completions = (column(name, "<i4").tolist() for name in ("prompt_lengths", "completion_lengths"))
    rewards, advantages = (column(name, "<f8").tolist() for name in ("rewards", "advantages"))
    spans = column("version_spans", "<i4").tolist()
    for name, ids, tokens in (("prompt_ids", prompts, sum(prompts)), ("completion_ids", completions, sum(completions))):
        values = column(name, "<i4")
        if min(ids) < 1 or len(values) != tokens or _least(values) < 0:
            raise RuntimeError(f"{name} is out of bounds")
    logprobs = column("inference_logprobs", "<f4")
    if not -np.inf < _least(logprobs) <= _most(logprobs) < 1e-3 or _most(column("completion_mask", "|u1")) > 1:
        raise RuntimeError("a column is out of bounds")
    lengths = [a + b for a, b in zip(prompts, completions, strict=True)]
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    entry = ENTRY_STRUCT.pack(
        -1 if header.prompt_index is None else header.prompt_index,
        time.time(),
        header.policy_version,
        max(spans[1::4]),
        sum(lengths),
        len(lengths),
        max(lengths),
        len(frame),
        crc,
        -header.policy_version,
        mean,
        deviation,
        sum(map(abs, advantages)) / len(advantages),
        0,
        0,
        header.finish_reasons.count("length"),
        0,
    )
    return header, entry, struct.pack(f"<{len(lengths)}i", *lengths)


class Http(asyncio.Protocol):
    """Reads requests with a `content-length` and answers them, one at a time."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._got = bytearray()
        self._needed = 0
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer a request when it is complete."""
        self._got += data
        if not self._needed:
            head, end, _ = self._got.partition(b"\r\n\r\n")
            if not end:
                return
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            del self._got[: len(head) + len(end)]
            self._needed = length
        if len(self._got) == self._needed:
            body, self._got, self._needed = self._got, bytearray(), 0
            self._task = asyncio.create_task(self._answer(memoryview(body)))

    async def _answer(self, body: memoryview) -> None:
        text = await self._floor.append(body)
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))


async def serve(redis_socket: str, folder: Path) -> None:
    """Serve on a free port until this process is killed; print the port."""
    loop = asyncio.get_running_loop()
    _, redis = await loop.create_unix_connection(Redis, redis_socket)
    floor = Floor(redis, folder)
    server = await loop.create_server(lambda: Http(floor), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], Path(sys.argv[2])))
