"""Frames against msgspec with Python lists, the encoding that prime-rl uses, measured in turns in the same run.

    python benchmarks/frames.py --rounds 41 --json frames.json

A group of 8 rollouts of 2,048 tokens (256 of them prompt). The reference writes one msgspec struct of lists per rollout
(ids and masks of prompt and completion, logprobs, advantage, reward; prime-rl's own has a temperature per token beside)
and reads it back to numpy arrays. Each figure is processor time, the median over the rounds with the least and the
largest; a ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import zstandard

from replaybuf.columns import COMPRESSION_LEVEL
from replaybuf.frame import decode_frame, encode_frame
from replaybuf.group import Group

ROLLOUTS, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 256, 1792
VOCABULARY = 151_936
PHRASES, PHRASE_TOKENS, IN_PHRASES = 400, 12, 0.6
TARGETS = {"encode": 40, "decode": 200, "size": 0.7}

Ids = npt.NDArray[np.int32]


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
    """Measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    group = grpo_like_group(np.random.default_rng(0))
    took = measure(cases(group), given.rounds)
    report = {
        "machine": {
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "msgspec", "crc32c", "zstandard", "safetensors")},
        },
        "microseconds": {name: [statistics.median(us), min(us), max(us)] for name, us in took.items()},
        "ratios": ratios(took) | {"size": len(encode_frame(group)) / len(encode_lists(group))},
        "bytes": sizes(group),
        "zstd": zstd_figures(group, given.rounds),
        "targets": TARGETS,
    }
    show(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def grpo_like_group(rng: np.random.Generator) -> Group:
    """Make up a group: one prompt for all rollouts, completions of common ids (Zipf) and phrases that come again."""
    shares = 1 / np.arange(1, VOCABULARY + 1) ** 1.1
    names = rng.permutation(VOCABULARY).astype(np.int32)

    def tokens(count: int) -> Ids:
        return names[rng.choice(VOCABULARY, count, p=shares / shares.sum())]

    phrases = tokens(PHRASES * PHRASE_TOKENS).reshape(PHRASES, PHRASE_TOKENS)
    completions = []
    for _ in range(ROLLOUTS):
        parts: list[Ids] = []
        while sum(map(len, parts)) < COMPLETION_TOKENS:
            parts.append(phrases[rng.integers(PHRASES)] if rng.random() < IN_PHRASES else tokens(PHRASE_TOKENS))
        completions.append(np.concatenate(parts)[:COMPLETION_TOKENS])
    count = ROLLOUTS * COMPLETION_TOKENS
    rewards = rng.integers(0, 2, ROLLOUTS).astype(np.float64)
    return Group(
        group_id="p5",
        prompt_id="gsm8k/train/17",
        policy_version=7,
        prompt_ids=np.tile(tokens(PROMPT_TOKENS), ROLLOUTS),
        prompt_lengths=np.full(ROLLOUTS, PROMPT_TOKENS, np.int32),
        completion_ids=np.concatenate(completions),
        completion_lengths=np.full(ROLLOUTS, COMPLETION_TOKENS, np.int32),
        completion_mask=np.ones(count, np.bool_),
        inference_logprobs=np.log(rng.beta(5, 1, count)).astype(np.float32),
        rewards=rewards,
        advantages=rewards - rewards.mean(),
        version_spans=np.array([[k, 7, 0, COMPLETION_TOKENS] for k in range(ROLLOUTS)], np.int32),
        temperatures=np.ones(ROLLOUTS, np.float32),
        finish_reasons=("stop",) * ROLLOUTS,
        ticket="t0-5-1-1",
        prompt_index=5,
        metadata={"env": "gsm8k"},
    )


def encode_lists(group: Group) -> bytes:
    """Encode as the reference does, from numpy."""
    p, c = PROMPT_TOKENS, COMPLETION_TOKENS
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
                for k in range(ROLLOUTS)
            ]
        )
    )


def decode_lists(raw: bytes) -> list[tuple[npt.NDArray[np.generic], ...]]:
    """Decode as the reference does, to numpy."""
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


def cases(group: Group) -> dict[str, tuple[Callable[[], object], int]]:
    """Name what is measured, with how often in a round."""
    frame, packed, lists = encode_frame(group), encode_frame(group, compress=True), encode_lists(group)
    tensors = {
        name: value
        for name, value in zip(group.__struct_fields__, msgspec.structs.astuple(group), strict=True)
        if isinstance(value, np.ndarray)
    }
    saved = safetensors.numpy.save(tensors)
    return {
        "lists: encode": (lambda: encode_lists(group), 4),
        "lists: decode": (lambda: decode_lists(lists), 4),
        "frame: encode": (lambda: encode_frame(group), 60),
        "frame: decode": (lambda: decode_frame(frame), 60),
        "frame: decode, unverified": (lambda: decode_frame(frame, verify=False), 60),
        "frame: encode, zstd": (lambda: encode_frame(group, compress=True), 8),
        "frame: decode, zstd": (lambda: decode_frame(packed), 8),
        "safetensors: encode": (lambda: safetensors.numpy.save(tensors), 30),
        "safetensors: decode": (lambda: safetensors.numpy.load(saved), 30),
        "crc32c alone": (lambda: crc32c.crc32c(frame), 60),
        "copy alone": (lambda: bytearray(frame), 60),
    }


def measure(named: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, list[float]]:
    """Time each case once per round, in microseconds per call; the first round, which warms caches, is not counted."""
    took: dict[str, list[float]] = {name: [] for name in named}
    for number in range(rounds + 1):
        for name, (call, times) in named.items():
            started = time.thread_time()
            for _ in range(times):
                call()
            if number:
                took[name].append((time.thread_time() - started) / times * 1e6)
    return took


def ratios(took: dict[str, list[float]]) -> dict[str, list[float]]:
    """How many times faster than lists: median, least and largest over the rounds."""
    found = {}
    for name in ("encode", "decode", "decode, unverified", "encode, zstd", "decode, zstd"):
        reference = took[f"lists: {name.partition(',')[0]}"]
        by_round = [slow / fast for slow, fast in zip(reference, took[f"frame: {name}"], strict=True)]
        found[name] = [statistics.median(by_round), min(by_round), max(by_round)]
    for name in ("encode", "decode"):
        by_round = [a / b for a, b in zip(took[f"lists: {name}"], took[f"safetensors: {name}"], strict=True)]
        found[f"safetensors {name}"] = [statistics.median(by_round), min(by_round), max(by_round)]
    return found


def sizes(group: Group) -> dict[str, int]:
    """Bytes of the group in each form."""
    return {
        "lists": len(encode_lists(group)),
        "frame": len(encode_frame(group)),
        "frame, zstd": len(encode_frame(group, compress=True)),
    }


def zstd_figures(group: Group, rounds: int) -> dict[str, dict[str, float]]:
    """Ratio and speed of zstd on each column, at the level of the encoder; speeds in GB of raw column per second."""
    ids = np.concatenate([group.prompt_ids, group.completion_ids])
    noise = np.random.default_rng(1).integers(0, VOCABULARY, len(ids), dtype=np.int32)
    columns: dict[str, npt.NDArray[np.generic]] = {
        "ids, prompt and completion": ids,
        "ids, completion": group.completion_ids,
        "ids, uniformly random": noise,
        "mask": group.completion_mask,
        "logprobs": group.inference_logprobs,
    }
    figures = {}
    for name, column in columns.items():
        compressor, decompressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL), zstandard.ZstdDecompressor()
        raw = column.view(np.uint8).data
        packed = compressor.compress(raw)
        took = measure(
            {
                "in": (lambda c=compressor, r=raw: c.compress(r), 4),
                "out": (lambda d=decompressor, p=packed: d.decompress(p), 4),
            },
            rounds,
        )
        figures[name] = {
            "ratio": column.nbytes / len(packed),
            "compress_gb_per_s": column.nbytes / statistics.median(took["in"]) / 1e3,
            "decompress_gb_per_s": column.nbytes / statistics.median(took["out"]) / 1e3,
        }
    return figures


def show(report: dict[str, dict]) -> None:
    """Print the report."""
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    for name, (median, least, largest) in report["microseconds"].items():
        print(f"{name:28}{median:>10.1f} us [{least:.1f} to {largest:.1f}]")
    for name, found in report["ratios"].items():
        if isinstance(found, float):
            print(f"{name + ' / lists':28}{found:>10.2f}  (target: at most {TARGETS[name]})")
            continue
        target = f"  (target: at least {TARGETS[name]})" if name in TARGETS else ""
        print(f"{name + ' / lists':28}{found[0]:>10.0f} x  [{found[1]:.0f} to {found[2]:.0f}]{target}")
    print(", ".join(f"{name} {size:,} bytes" for name, size in report["bytes"].items()))
    for name, found in report["zstd"].items():
        print(
            f"zstd, {name:27}{found['ratio']:>8.2f} x  in {found['compress_gb_per_s']:.2f} GB/s, "
            f"out {found['decompress_gb_per_s']:.2f} GB/s"
        )


if __name__ == "__main__":
    main()
