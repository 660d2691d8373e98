"""Measure the generator's processor time per stored rollout, with an engine that answers at once.

    python benchmarks/generator.py --rollouts 16000 --repeats 5

`replaybuf generate` takes tickets of a `replaybuf serve`, asks `null_engine.py` for 8 rollouts of 256 tokens, decodes
and scores them (exact-match) and appends groups durably (`appendfsync always`), all over HTTP. The figure is user and
system time of all threads per stored rollout after a warm start; rollouts per second of one core are its inverse.
Sides are the two calls of vLLM. References are clients that ask the engine for the same completions and drop the
answers (`bare_client.py`), by aiohttp and by httpx, and one that decodes JSON and texts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
from measured import Measured, Target
from null_engine import COMPLETIONS, TOKENS, VOCABULARY
from served import Served

from replaybuf.client.client import Client

SIDES = {TOKENS: (), COMPLETIONS: ("--completions",)}
FLOORS = {
    f"bare aiohttp, decodes {TOKENS}": (TOKENS, "aiohttp", True),
    f"bare aiohttp, decodes {COMPLETIONS}": (COMPLETIONS, "aiohttp", True),
    "bare aiohttp": (TOKENS, "aiohttp", False),
    "bare httpx": (TOKENS, "httpx", False),
}
WANTED = 2000.0
"""Target: rollouts of 256 tokens per second of processor time."""
NULL_ENGINE, BARE_CLIENT = (Path(__file__).parent / f"{name}.py" for name in ("null_engine", "bare_client"))
WARM_ROLLOUTS = 2000
POLL_S = 0.05
TIMEOUT_S = 300.0
STOP_S = 30.0


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16_000, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a rollout")
    parser.add_argument("--inflight", type=int, default=64, help="groups at the same time")
    settings = parser.parse_args()
    packages = ["aiohttp", "httpx", "msgspec", "numpy", "tokenizers", "uvloop"]
    results = Measured("generator", reference="bare aiohttp", packages=packages, settings=vars(settings))
    cost: dict[str, list[float]] = defaultdict(list)
    rate: dict[str, list[float]] = defaultdict(list)
    wall: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="replaybuf-bench-") as name, Served(Path(name) / "data") as served:
        write_model(Path(name))
        for repeat in range(settings.repeats):
            for side, options in SIDES.items():
                cpu_s, took_s, rollouts = measure(Path(name), served, f"r{repeat}{len(options)}", options, settings)
                cost[side].append(cpu_s / rollouts * 1e6)
                rate[side].append(rollouts / cpu_s)
                wall[side].append(rollouts / took_s)
            for floor, how in FLOORS.items():
                cost[floor].append(floor_us(Path(name), *how, settings))
    results.record("processor time of the generator per rollout", cost, unit="us")
    wanted = {side: [Target("median", "at least", WANTED)] for side in SIDES}
    results.record("rollouts per second of its processor time", rate, unit="1/s", targets=wanted)
    results.record("rollouts stored per second by the clock, all processes on this machine", wall, unit="1/s")
    results.save()


def measure(
    folder: Path, served: Served, run: str, options: tuple[str, ...], settings: argparse.Namespace
) -> tuple[float, float, int]:
    """Generate for a new run; return seconds of processor and clock, and the rollouts stored."""
    with Client(served.url, run) as client, contextlib.ExitStack() as stack:
        room = 1 << 30
        client.put_run(
            {
                "batch": {"groups_per_batch": 1 << 17, "tokens_per_batch": room, "seq_len": 4096},
                "group_size": settings.group_size,
            }
        )
        url = stack.enter_context(null_engine(settings, options))
        generator = stack.enter_context(
            process(["-m", "replaybuf", "--log-level", "error", *generate(folder, served.url, run, url, settings)])
        )
        watched = psutil.Process(generator.pid)
        first = reach(client, generator, WARM_ROLLOUTS // settings.group_size)
        cpu_s, begun_s = spent_s(watched), time.perf_counter()
        last = reach(client, generator, first + settings.rollouts // settings.group_size)
        return spent_s(watched) - cpu_s, time.perf_counter() - begun_s, (last - first) * settings.group_size


def floor_us(folder: Path, path: str, client: str, decodes: bool, settings: argparse.Namespace) -> float:
    """Return the microseconds of processor per rollout that the bare client needs."""
    with null_engine(settings, SIDES[path]) as url:
        options: dict[str, object] = {
            "client": client,
            "requests": settings.rollouts // settings.group_size,
            "inflight": settings.inflight,
        }
        options |= {"group-size": settings.group_size, "tokens": settings.tokens}
        options |= {"tokenizer": folder / "model"} if decodes else {}
        words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, str(BARE_CLIENT), url, path, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return float(float(done.stdout) / settings.group_size * 1e6)


def generate(folder: Path, service: str, run: str, engine: str, settings: argparse.Namespace) -> list[str]:
    """Build the arguments of the generator."""
    options = {
        "url": service,
        "run": run,
        "engine": engine,
        "environment": "exact-match",
        "prompts": str(folder / "prompts.jsonl"),
        "tokenizer": str(folder / "model"),
        "max-tokens": str(settings.tokens),
        "max-inflight-groups": str(settings.inflight),
    }
    return ["generate", *(part for name, value in options.items() for part in (f"--{name}", value))]


def write_model(folder: Path) -> None:
    """Write a tokenizer of `VOCABULARY` words, and prompts."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    made = tokenizers.Tokenizer(models.WordLevel({f"Ġw{n}": n for n in range(VOCABULARY)}, unk_token="Ġw0"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(use_regex=True)
    made.decoder = decoders.ByteLevel()
    (folder / "model").mkdir()
    made.save(str(folder / "model" / "tokenizer.json"))
    rows = [{"prompt": "".join(f" w{n * 7 % 1000}" for n in range(i, i + 64)), "answer": "w1"} for i in range(1000)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run Python with these arguments; stop it by a signal at the end."""
    started = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(STOP_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        if started.stdout is not None:
            started.stdout.close()


@contextlib.contextmanager
def null_engine(settings: argparse.Namespace, options: tuple[str, ...]) -> Iterator[str]:
    """Run an engine that answers at once; yield its address."""
    sizes = ("--rollouts", str(settings.group_size), "--tokens", str(settings.tokens))
    with process([str(NULL_ENGINE), *sizes, *options]) as engine:
        yield listening(engine)


def listening(engine: subprocess.Popen[str]) -> str:
    """Return the address that a server prints."""
    match = re.match(r"listening on (http://\S+)", engine.stdout.readline() if engine.stdout else "")
    if match is None:
        raise RuntimeError("the null engine does not listen")
    return match[1]


def reach(client: Client, generator: subprocess.Popen[str], groups: int) -> int:
    """Wait until this many groups are stored; return their number."""
    ends_s = time.monotonic() + TIMEOUT_S
    while (stored := client.get_run().groups.stored) < groups:
        if generator.poll() is not None or time.monotonic() > ends_s:
            raise RuntimeError(f"{stored} of {groups} groups are stored, and no more arrive")
        time.sleep(POLL_S)
    return stored


def spent_s(watched: psutil.Process) -> float:
    """Return user and system seconds of all threads."""
    times = watched.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
