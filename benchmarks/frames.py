"""Encode and decode frames, against msgspec with Python lists.

    python benchmarks/frames.py --rounds 41

Groups have 8 rollouts of 2,048 tokens, or 16 of 8,192 (256 of them prompt): the fixed cost of a frame does not grow
with them, the cost of lists does. The reference, the encoding of prime-rl without its temperature per token, writes
one msgspec struct of lists per rollout (ids and masks of prompt and completion, logprobs, advantage, reward) and reads
it back to numpy. Times are processor time of the thread. zstd is timed on single columns.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import zstandard
from measured import Measured, Target

from replaybuf.wire.column.columns import COMPRESSION_LEVEL
from replaybuf.wire.frame import decode_frame, encode_frame
from replaybuf.wire.group import Group

PROMPT_TOKENS = 256
SHAPES = ((8, 2048), (16, 8192))
"""Rollouts of a group, and tokens per rollout."""
VOCABULARY = 151_936
PHRASES, PHRASE_TOKENS, IN_PHRASES = 400, 12, 0.6
LISTS, FRAME = "lists", "frame"
FASTER = {"encode": 40, "decode": 200}
"""Targets: times faster than lists."""
SIZE = 0.7
"""Target: share of the bytes of lists."""

Ids = npt.NDArray[np.int32]
Timed = tuple[Callable[[], object], int]
"""A call, and its number per round."""


class Sample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """One rollout of the reference."""

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    completion_logprobs: list[float]
    advantage: float
    reward: float


class Samples(msgspec.Struct, array_like=True, gc=False):
    """A group of the reference."""

    examples: list[Sample]


_encode_lists = msgspec.msgpack.Encoder().encode
_decode_lists = msgspec.msgpack.Decoder(Samples).decode


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    arguments = parser.parse_args()
    packages = ["numpy", "msgspec", "crc32c", "zstandard", "safetensors"]
    results = Measured("frames", reference=LISTS, packages=packages, settings=vars(arguments))
    for rollouts, tokens in SHAPES:
        group, of = grpo_like_group(np.random.default_rng(0), rollouts, tokens), f"{rollouts} x {tokens:,} tokens"
        for what, calls in cases(group).items():
            wanted = {FRAME: [Target("ratio", "at least", FASTER[what])]}
            took = measure(calls, arguments.rounds)
            results.record(f"{what}, {of}", took, unit="us", ratio="reference / it", targets=wanted)
        results.record(f"size, {of}", sizes(group), unit="bytes", targets={FRAME: [Target("ratio", "at most", SIZE)]})
    record_zstd(results, grpo_like_group(np.random.default_rng(0), *SHAPES[0]), arguments.rounds)
    results.save()


def grpo_like_group(rng: np.random.Generator, rollouts: int = SHAPES[0][0], tokens: int = SHAPES[0][1]) -> Group:
    """Make a group of rollouts with one prompt.

    Completions have common ids (Zipf) and repeated phrases.
    """
    completion_tokens = tokens - PROMPT_TOKENS
    shares = 1 / np.arange(1, VOCABULARY + 1) ** 1.1
    names = rng.permutation(VOCABULARY).astype(np.int32)

    def drawn(count: int) -> Ids:
        return names[rng.choice(VOCABULARY, count, p=shares / shares.sum())]

    phrases = drawn(PHRASES * PHRASE_TOKENS).reshape(PHRASES, PHRASE_TOKENS)
    completions = []
    for _ in range(rollouts):
        parts: list[Ids] = []
        while sum(map(len, parts)) < completion_tokens:
            parts.append(phrases[rng.integers(PHRASES)] if rng.random() < IN_PHRASES else drawn(PHRASE_TOKENS))
        completions.append(np.concatenate(parts)[:completion_tokens])
    count = rollouts * completion_tokens
    rewards = rng.integers(0, 2, rollouts).astype(np.float64)
    return Group(
        group_id="p5",
        prompt_id="gsm8k/train/17",
        policy_version=7,
        prompt_ids=np.tile(drawn(PROMPT_TOKENS), rollouts),
        prompt_lengths=np.full(rollouts, PROMPT_TOKENS, np.int32),
        completion_ids=np.concatenate(completions),
        completion_lengths=np.full(rollouts, completion_tokens, np.int32),
        completion_mask=np.ones(count, np.bool_),
        inference_logprobs=np.log(rng.beta(5, 1, count)).astype(np.float32),
        rewards=rewards,
        advantages=rewards - rewards.mean(),
        version_spans=np.array([[k, 7, 0, completion_tokens] for k in range(rollouts)], np.int32),
        temperatures=np.ones(rollouts, np.float32),
        finish_reasons=("stop",) * rollouts,
        ticket="t0-5-1-1",
        prompt_index=5,
        metadata={"env": "gsm8k"},
    )


def encode_lists(group: Group) -> bytes:
    """Encode from numpy as the reference does."""
    p, c = int(group.prompt_lengths[0]), int(group.completion_lengths[0])
    mask = np.zeros(p, np.bool_)
    advantages = group.rewards if group.advantages is None else group.advantages
    return _encode_lists(
        Samples(
            [
                Sample(
                    group.prompt_ids[k * p : (k + 1) * p].tolist(),
                    mask.tolist(),
                    group.completion_ids[k * c : (k + 1) * c].tolist(),
                    group.completion_mask[k * c : (k + 1) * c].tolist(),
                    group.inference_logprobs[k * c : (k + 1) * c].tolist(),
                    float(advantages[k]),
                    float(group.rewards[k]),
                )
                for k in range(group.rollouts)
            ]
        )
    )


def decode_lists(raw: bytes) -> list[tuple[npt.NDArray[np.generic], ...]]:
    """Decode to numpy as the reference does."""
    return [
        (
            np.array(sample.prompt_ids, np.int32),
            np.array(sample.prompt_mask, np.bool_),
            np.array(sample.completion_ids, np.int32),
            np.array(sample.completion_mask, np.bool_),
            np.array(sample.completion_logprobs, np.float32),
        )
        for sample in _decode_lists(raw).examples
    ]


def cases(group: Group) -> dict[str, dict[str, Timed]]:
    """Return the measured calls by name, with their number per round."""
    frame, packed, lists = encode_frame(group), encode_frame(group, compress=True), encode_lists(group)
    tensors = {
        name: value
        for name, value in zip(group.__struct_fields__, msgspec.structs.astuple(group), strict=True)
        if isinstance(value, np.ndarray)
    }
    saved = safetensors.numpy.save(tensors)
    return {
        "encode": {
            LISTS: (lambda: encode_lists(group), 4),
            FRAME: (lambda: encode_frame(group), 60),
            "frame, zstd": (lambda: encode_frame(group, compress=True), 8),
            "safetensors": (lambda: safetensors.numpy.save(tensors), 30),
            "crc32c alone": (lambda: crc32c.crc32c(frame), 60),
            "copy alone": (lambda: bytearray(frame), 60),
        },
        "decode": {
            LISTS: (lambda: decode_lists(lists), 4),
            FRAME: (lambda: decode_frame(frame), 60),
            "frame, zstd": (lambda: decode_frame(packed), 8),
            "safetensors": (lambda: safetensors.numpy.load(saved), 30),
        },
    }


def measure(calls: dict[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Time each call once per round in microseconds; the first round warms the caches and is dropped."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, (call, times) in calls.items():
            started = time.thread_time()
            for _ in range(times):
                call()
            if number:
                took[name].append((time.thread_time() - started) / times * 1e6)
    return took


def sizes(group: Group) -> dict[str, list[int]]:
    """Return the bytes of the group in each form."""
    return {
        LISTS: [len(encode_lists(group))],
        FRAME: [len(encode_frame(group))],
        "frame, zstd": [len(encode_frame(group, compress=True))],
    }


def record_zstd(results: Measured, group: Group, rounds: int) -> None:
    """Record ratio and speed of zstd on each column, at the level of the encoder."""
    ids = np.concatenate([group.prompt_ids, group.completion_ids])
    noise = np.random.default_rng(1).integers(0, VOCABULARY, len(ids), dtype=np.int32)
    columns: dict[str, npt.NDArray[np.generic]] = {
        "ids, prompt and completion": ids,
        "ids, completion": group.completion_ids,
        "ids, uniformly random": noise,
        "mask": group.completion_mask,
        "logprobs": group.inference_logprobs,
    }
    for name, column in columns.items():
        compressor, decompressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL), zstandard.ZstdDecompressor()
        raw = column.view(np.uint8).data
        packed = compressor.compress(raw)
        ways: dict[str, Timed] = {
            "in": (functools.partial(compressor.compress, raw), 4),
            "out": (functools.partial(decompressor.decompress, packed), 4),
        }
        rates = {way: [column.nbytes / us / 1e3 for us in took] for way, took in measure(ways, rounds).items()}
        results.record(f"zstd, {name}", {"raw": [column.nbytes], "zstd": [len(packed)]}, unit="bytes", reference="raw")
        results.record(f"zstd, {name}: speed", rates, unit="GB/s")


if __name__ == "__main__":
    main()
