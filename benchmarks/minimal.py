"""The hand-written path from producers to a trainer through Redis and HTTP: the reference of `path.py`.

A producer SETs a payload and XADDs its key. The server XREADs keys, MGETs payloads and answers them one after another,
and the trainer makes arrays of the bytes. Or the server lays them out as the arrays of a micro-batch. Nothing is
checked, deduplicated, decided, recorded, packed or recovered.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import redis.asyncio as aioredis

from replaybuf.wire.group import Group

COLUMNS = (
    ("prompt_ids", np.int32),
    ("completion_ids", np.int32),
    ("inference_logprobs", np.float32),
    ("prompt_lengths", np.int32),
    ("completion_lengths", np.int32),
    ("rewards", np.float64),
    ("advantages", np.float64),
    ("completion_mask", np.bool_),
)
LAID_OUT = (
    ("input_ids", np.int32),
    ("position_ids", np.int32),
    ("loss_mask", np.bool_),
    ("inference_logprobs", np.float32),
    ("advantages", np.float32),
    ("cu_seqlens", np.int32),
)
"""Arrays of `lay_out`, in order."""
KEYS_AT_ONCE = 64
"""Payloads of one MGET: some 8 MB."""

Arrays = dict[str, npt.NDArray[Any]]

_SIZES = struct.Struct(f"<{len(COLUMNS)}I")


def to_bytes(group: Group) -> bytes:
    """Write a group: the sizes of its columns, then the columns."""
    arrays = [getattr(group, name) for name, _ in COLUMNS]
    return b"".join([_SIZES.pack(*(array.nbytes for array in arrays)), *arrays])


def read_groups(body: bytes) -> Iterator[Arrays]:
    """Read the groups of a body as views."""
    at = 0
    while at < len(body):
        sizes = _SIZES.unpack_from(body, at)
        at += _SIZES.size
        arrays: Arrays = {}
        for (name, dtype), size in zip(COLUMNS, sizes, strict=True):
            arrays[name] = np.frombuffer(body, dtype, size // np.dtype(dtype).itemsize, at)
            at += size
        yield arrays


def lay_out(groups: Sequence[Arrays]) -> Arrays:
    """Put all rollouts one after another into the arrays of a micro-batch."""
    ids, positions, masks, logprobs, advantages, lengths = [], [], [], [], [], []
    for group in groups:
        prompts = [0, *itertools.accumulate(group["prompt_lengths"].tolist())]
        completions = [0, *itertools.accumulate(group["completion_lengths"].tolist())]
        for k, advantage in enumerate(group["advantages"].tolist()):
            p, c = prompts[k + 1] - prompts[k], completions[k + 1] - completions[k]
            span = slice(completions[k], completions[k + 1])
            ids += [group["prompt_ids"][prompts[k] : prompts[k + 1]], group["completion_ids"][span]]
            positions.append(np.arange(p + c, dtype=np.int32))
            masks += [np.zeros(p, np.bool_), group["completion_mask"][span]]
            logprobs += [np.zeros(p, np.float32), group["inference_logprobs"][span]]
            advantages += [np.zeros(p, np.float32), np.full(c, advantage, np.float32)]
            lengths.append(p + c)
    arrays = {"input_ids": ids, "position_ids": positions, "loss_mask": masks, "inference_logprobs": logprobs}
    laid_out = {name: np.concatenate(parts) for name, parts in (arrays | {"advantages": advantages}).items()}
    return laid_out | {"cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32)}


def arrays_to_bytes(arrays: Arrays) -> bytes:
    """Write arrays one after another, after their sizes."""
    sizes = [array.nbytes for array in arrays.values()]
    return b"".join([struct.pack(f"<{len(sizes)}Q", *sizes), *(array.data for array in arrays.values())])


def arrays_from_bytes(body: bytes) -> Arrays:
    """Read the arrays as views."""
    at = struct.calcsize(f"<{len(LAID_OUT)}Q")
    arrays: Arrays = {}
    sizes = struct.unpack_from(f"<{len(LAID_OUT)}Q", body)
    for (name, dtype), size in zip(LAID_OUT, sizes, strict=True):
        arrays[name] = np.frombuffer(body, dtype, size // np.dtype(dtype).itemsize, at)
        at += size
    return arrays


async def append(client: aioredis.Redis, stream: str, groups: Sequence[Group]) -> None:
    """Store groups by SET and XADD in one pipeline."""
    pipe = client.pipeline(transaction=False)
    for group in groups:
        key = f"{stream}:{group.group_id}"
        pipe.set(key, to_bytes(group))
        pipe.xadd(stream, {"key": key})
    await pipe.execute()


def serve(redis_url: str, port: int) -> None:
    """Answer `/STREAM/STEP?groups=N` with the payloads of N groups, `&laid_out=1` with the arrays of a micro-batch.

    Runs until it is killed.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    client = aioredis.Redis.from_url(redis_url, socket_timeout=None, protocol=2)
    known: dict[str, list[bytes]] = {}
    read_to: dict[str, bytes] = {}

    async def batch(request: Request) -> Response:
        stream, wanted = request.path_params["stream"], int(request.query_params["groups"])
        first = request.path_params["step"] * wanted
        pending = known.setdefault(stream, [])
        while len(pending) < first + wanted:
            answer: Any = await client.xread({stream: read_to.get(stream, b"0")}, block=1000)
            for _, entries in answer:
                pending += [fields[b"key"] for _, fields in entries]
                read_to[stream] = entries[-1][0]
        names = pending[first : first + wanted]
        payloads: list[Any] = []
        for start in range(0, wanted, KEYS_AT_ONCE):
            payloads += await client.mget(names[start : start + KEYS_AT_ONCE])
        body = b"".join(payloads)
        if "laid_out" not in request.query_params:
            return Response(body)
        return Response(await asyncio.to_thread(lambda: arrays_to_bytes(lay_out(list(read_groups(body))))))

    app = Starlette(routes=[Route("/{stream}/{step:int}", batch)])
    uvicorn.run(app, host="127.0.0.1", port=port, http="httptools", loop="uvloop", log_level="warning")
