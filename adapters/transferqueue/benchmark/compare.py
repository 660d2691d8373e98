"""Puts and gets of four back ends of TransferQueue in alternating runs, as verl's RFC 7579 asks.

    python benchmark/compare.py --runs 5 --tokens 512 2048 --resident 5000 50000 --puts 200 --json FILE

Back ends: SimpleStorage (memory), one file per sample and field with rename, and Replaybuf with `appendfsync everysec`
and `always`. A sample has five fields: prompt and response tokens, mask, log probabilities, and its metadata. Prints
medians of samples per second, the spread, and the ratio to SimpleStorage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import file_backend
import torch
import transfer_queue
from omegaconf import OmegaConf
from starting_ray import start_ray
from tensordict import NonTensorStack, TensorDict

from replaybuf_transferqueue import BACKEND
from tests.valkeys import Valkey

BACK_ENDS = ("SimpleStorage", "files", "everysec", "always")
FILL = 250


def samples(count: int, tokens: int) -> TensorDict:
    """Make samples with `tokens` tokens, a quarter of them prompt."""
    prompt, response = tokens // 4, tokens - tokens // 4
    return TensorDict(
        {
            "prompts": torch.randint(0, 150_000, (count, prompt)),
            "responses": torch.randint(0, 150_000, (count, response)),
            "response_mask": torch.ones(count, response, dtype=torch.bool),
            "rollout_log_probs": torch.rand(count, response),
            "extra_fields": NonTensorStack(*[{"reward": 1.0, "turns": n} for n in range(count)]),
        },
        batch_size=count,
    )


@contextmanager
def started(back_end: str, folder: Path) -> Iterator[None]:
    """Start TransferQueue on a back end."""
    if back_end in ("everysec", "always"):
        with Valkey(folder / back_end, appendfsync=back_end, save="") as valkey:
            durability = "strict" if back_end == "always" else "relaxed"
            with _queue(BACKEND, {"url": valkey.url, "durability": durability}):
                yield
    elif back_end == "files":
        with _queue(file_backend.FILES, {"folder": str(folder / "files")}):
            yield
    else:
        with _queue(back_end, {}):
            yield


@contextmanager
def _queue(name: str, settings: dict[str, Any]) -> Iterator[None]:
    backend: dict[str, Any] = {"storage_backend": name, name: settings}
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))
    try:
        yield
    finally:
        transfer_queue.close()


def measure(tokens: int, resident: int, puts: int) -> dict[str, float]:
    """Fill the queue, then put 1 and 8 samples per call, and get 8; returns samples per second."""
    for first in range(0, resident, FILL):
        keys = [f"resident-{first + n}" for n in range(FILL)]
        transfer_queue.kv_batch_put(keys, "train", samples(FILL, tokens))
    rates = {}
    for per_put in (1, 8):
        batches = [samples(per_put, tokens) for _ in range(16)]
        begun_s = time.perf_counter()
        for number in range(puts):
            keys = [f"put-{per_put}-{number}-{n}" for n in range(per_put)]
            transfer_queue.kv_batch_put(keys, "train", batches[number % 16])
        rates[f"put {per_put}"] = puts * per_put / (time.perf_counter() - begun_s)
    begun_s = time.perf_counter()
    for number in range(puts):
        keys = [f"put-8-{number}-{n}" for n in range(8)]
        transfer_queue.kv_batch_get(keys=keys, partition_id="train")
    rates["get 8"] = puts * 8 / (time.perf_counter() - begun_s)
    return rates


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--resident", type=int, nargs="+", default=[5000, 50000])
    parser.add_argument("--puts", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start_ray(4)
    found: dict[str, dict[str, list[float]]] = {}
    for run in range(options.runs):
        for tokens in options.tokens:
            for resident in options.resident:
                for back_end in BACK_ENDS:
                    with tempfile.TemporaryDirectory() as folder, started(back_end, Path(folder)):
                        for name, rate in measure(tokens, resident, options.puts).items():
                            case = f"{tokens} tokens, {resident} resident, {name}"
                            found.setdefault(case, {}).setdefault(back_end, []).append(rate)
                            print(f"run {run} {case} {back_end}: {rate:.0f}/s", flush=True)
                    if options.json:
                        options.json.write_text(json.dumps(found, indent=1))
    for case, rates in found.items():
        base = statistics.median(rates[BACK_ENDS[0]])
        cells = [
            f"{back_end} {middle:.0f} ({min(rate):.0f}-{max(rate):.0f}, {middle / base:.2f}x)"
            for back_end, rate in rates.items()
            for middle in [statistics.median(rate)]
        ]
        print(f"{case}: {', '.join(cells)}")


if __name__ == "__main__":
    main()
