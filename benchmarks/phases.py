"""Count the calls of an append, and sample its processor time, by phase.

    python benchmarks/phases.py --rounds 5
    python benchmarks/phases.py --calls

Groups of 8 rollouts x 2,048 tokens, one call after another on one connection, strict durability: one group in a call,
eight groups, and one group whose advantages the service computes. Calls are those of Python functions, C functions
apart; a coroutine that continues is a call of each function that awaits. They are exact. Processor time is that of the
whole process, divided by samples of its stack. What the service does besides appends is left out.

`--calls` only prints, for each kind, the Python calls of an append, the functions and modules that every append runs,
and the system calls of the whole process (with `strace`). `--list` adds the functions.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from urllib.parse import urlsplit

import msgspec
from floor import RUN, TIMEOUT_S, WARM_CALLS, numbered_groups, send
from measured import Measured
from served import Served

from replaybuf.client.client import Client

ALL, BESIDES = "all phases", "besides"
PHASES = {
    "HTTP in": "guard/connection.py connection_table.py httptools_impl.py:on_ httptools_impl.py:data_received",
    "HTTP out": "httptools_impl.py:send httptools_impl.py:on_response starlette/responses.py http/reply/ AppendResults",
    "body": "service/http/body/ httptools_impl.py:receive",
    "route, tokens": "service/http/ starlette/ httptools_impl.py service/traffic.py replaybuf/tracing/",
    "decode": "wire/frame.py:decode_frame wire/column/columns.py",
    "written anew": "wire/frame.py:encode_frame",
    "advantages": "kernel/strategy/advantages.py",
    "check": "wire/group_check.py run/append/group_check.py",
    "index entry": "store/groups.py:_entr store/groups.py:_publish_words rows/index.py:encode_entry store/entries.py",
    "Redis": "store/redis/ redis/asyncio/ store/groups.py asyncio/streams.py",
    "fold": "run/journal.py kernel/state/run_state.py store/known_ends.py",
    "after storing": "run/append/arrivals.py run/append/eviction.py",
    "orchestration": "run/append/",
}
"""Code of each phase: parts of the names of files, some with the start of a function's name.

The first match counts; other code belongs to the phase of its caller.
"""
OUTERMOST = {"data_received", "run_asgi", "_write_waiting", "on_response_complete", "resume_reading"}
"""Functions that the event loop calls for an append. It calls others for background work."""
KINDS: tuple[tuple[str, int, dict[str, None]], ...] = (
    ("one group", 1, {}),
    ("eight groups", 8, {}),
    ("one group without advantages", 1, {"advantages": None}),
)
COUNTED_CALLS = 50
SAMPLED_EVERY_S = 0.001


class CallCounter:
    """Counts calls of the main thread by phase, Python's and C's."""

    def __init__(self) -> None:
        self._phases: list[str] = []
        self._calls: Counter[str] = Counter()
        self._c_calls: Counter[str] = Counter()
        self._functions: Counter[str] = Counter()

    def start(self) -> None:
        """Start counting."""
        sys.setprofile(self._count)

    def stop(self) -> list[Counter[str]]:
        """Stop counting; return Python calls and C calls by phase, and Python calls by function."""
        sys.setprofile(None)
        return [self._calls, self._c_calls, self._functions]

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        caller = self._phases[-1] if self._phases else None
        if event == "call":
            phase = caller
            if caller != BESIDES:
                phase = phase_of(frame.f_code) or caller
            if caller is None and frame.f_code.co_name not in OUTERMOST:
                phase = BESIDES
            self._phases.append(phase or "orchestration")
            self._calls[self._phases[-1]] += 1
            if phase != BESIDES:
                self._functions[f"{short_name(frame.f_code.co_filename)}:{frame.f_code.co_qualname}"] += 1
        elif event == "return" and self._phases:
            self._phases.pop()
        elif event == "c_call":
            self._c_calls[caller or BESIDES] += 1


class Sampler:
    """Samples the stack of the main thread in processor time. Its share of a phase is that of the phase in the time."""

    def __init__(self) -> None:
        self._samples: Counter[str] = Counter()

    def start(self) -> None:
        """Start sampling."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLED_EVERY_S, SAMPLED_EVERY_S)

    def stop(self) -> list[Counter[str]]:
        """Stop sampling; return the samples."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        return [self._samples]

    def _sample(self, number: int, frame: FrameType | None) -> None:
        phase, own = None, False
        while frame:
            phase = phase or phase_of(frame.f_code)
            own = own or frame.f_code.co_name in OUTERMOST
            frame = frame.f_back
        self._samples[phase or "orchestration" if own else BESIDES] += 1


@functools.cache
def phase_of(code: CodeType) -> str | None:
    """Return the phase of a function, None if it works for several."""
    name = f"{short_name(code.co_filename)}:{code.co_name}"
    return next((phase for phase, parts in PHASES.items() if any(part in name for part in parts.split())), None)


@functools.cache
def short_name(path: str) -> str:
    """Return a file's path from its package on."""
    file = path.rpartition("site-packages/")[2]
    return f"replaybuf/{file.rpartition('/replaybuf/')[2]}" if "/replaybuf/" in file else file


class Switch:
    """Starts and stops a profiler at a signal, and writes what it found to a file."""

    def __init__(self, folder: Path, number: signal.Signals, profiler: Callable[[], CallCounter | Sampler]) -> None:
        self._folder = folder
        self._number = number
        self._profiler = profiler
        self._active: CallCounter | Sampler | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Start, or stop and write."""
        figures = self._active.stop() if self._active else []
        started = None if self._active else self._profiler()
        new = self._folder / "new"
        new.write_bytes(msgspec.json.encode(figures))
        new.rename(self._folder / self._number.name)
        self._active = started
        if started:
            started.start()


def main() -> None:
    """Profile each kind of call, and print and save its phases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=800, help="per round and kind, for the samples")
    parser.add_argument("--calls", action="store_true", help="count calls, functions, modules and system calls only")
    parser.add_argument("--list", action="store_true", help="with --calls: list the functions too")
    options = parser.parse_args()
    results = Measured(
        "phases", reference=ALL, packages=["uvicorn", "uvloop", "redis", "numpy"], settings=vars(options)
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with (
            Served(folder / "data", program=[sys.executable, __file__, scratch]) as served,
            Client(served.url, RUN, timeout_s=TIMEOUT_S) as client,
        ):
            client.put_run({"batch": {"tokens_per_batch": None, "groups_per_batch": 64, "seq_len": 16_384}})
            for kind in KINDS:
                if options.calls:
                    print_calls(served, folder, kind, listed=options.list)
                else:
                    profile(results, served, folder, kind, options.rounds, options.groups)
    if not options.calls:
        results.save()


def profile(
    results: Measured, served: Served, folder: Path, kind: tuple[str, int, dict[str, None]], rounds: int, groups: int
) -> None:
    """Record the calls of one kind of append, and its processor time in several rounds."""
    what, per_call, _ = kind
    calls, append = max(1, groups // per_call), sender(served, kind)
    append(WARM_CALLS)
    for unit, figures in zip(
        ("calls", "C calls"), switched(served, folder, signal.SIGUSR1, lambda: append(COUNTED_CALLS)), strict=False
    ):
        record(results, what, [figures], 1 / COUNTED_CALLS, unit)
    sampled, spent_s = list[dict[str, float]](), 0.0
    for _ in range(rounds):
        before_s = served.cpu_s
        sampled += switched(served, folder, signal.SIGUSR2, lambda: append(calls))
        spent_s += served.cpu_s - before_s
    samples = sum(sum(figures.values()) for figures in sampled)
    record(results, what, sampled, 1e6 * spent_s / samples / calls, "us")


def sender(served: Served, kind: tuple[str, int, dict[str, None]]) -> Callable[[int], None]:
    """Return a function that sends so many appends of a kind."""
    what, per_call, missing = kind
    address, numbers = urlsplit(served.url), numbered_groups()
    where = (str(address.hostname), int(address.port or 0))

    def append(count: int) -> None:
        prefix = f"{what} {time.monotonic_ns()}"
        send(
            where,
            [
                [
                    msgspec.structs.replace(group, group_id=f"{prefix} {group.group_id}", **missing)
                    for group, _ in zip(numbers, range(per_call), strict=False)
                ]
                for _ in range(count)
            ],
        )

    return append


def print_calls(served: Served, folder: Path, kind: tuple[str, int, dict[str, None]], *, listed: bool) -> None:
    """Print the calls of one kind of append, and the functions and modules that every append runs."""
    append = sender(served, kind)
    append(WARM_CALLS)
    calls, c_calls, by_function = switched(served, folder, signal.SIGUSR1, lambda: append(COUNTED_CALLS))
    python, c = (
        sum(number for phase, number in counted.items() if phase != BESIDES) / COUNTED_CALLS
        for counted in (calls, c_calls)
    )
    functions = {name: number / COUNTED_CALLS for name, number in by_function.items() if number >= COUNTED_CALLS}
    modules = {name.rpartition(":")[0] for name in functions}
    own = sum(name.startswith("replaybuf/") for name in modules)
    print(
        f"{kind[0]}: {python:.0f} Python calls, {c:.0f} C calls, {len(functions)} functions in {len(modules)} modules"
    )
    print(f"  {own} modules are ours; {system_calls(served, append)}")
    if listed:
        for name, number in sorted(functions.items()):
            print(f"  {number:6.1f}  {name}")


def system_calls(served: Served, append: Callable[[int], None]) -> str:
    """Describe the system calls of an append, with those that the service makes meanwhile for itself."""
    if shutil.which("strace") is None:
        return "system calls were not counted: strace is missing"
    strace = subprocess.Popen(["strace", "-c", "-f", "-p", str(served.pid)], stderr=subprocess.PIPE, text=True)
    if strace.stderr is None or "attached" not in strace.stderr.readline():
        return "system calls were not counted: strace cannot attach"
    append(COUNTED_CALLS)
    strace.send_signal(signal.SIGINT)
    rows = re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", strace.communicate()[1], re.MULTILINE)
    counts = {name: int(number) / COUNTED_CALLS for number, name in rows if name != "total"}
    shown = ", ".join(f"{name} {number:.1f}" for name, number in counts.items() if number >= 0.5)
    return f"{sum(counts.values()):.1f} system calls: {shown}"


def record(results: Measured, what: str, rounds: list[dict[str, float]], factor: float, unit: str) -> None:
    """Record figures by phase."""
    sides = defaultdict[str, list[float]](list)
    for figures in rounds:
        sides[ALL].append(factor * sum(number for name, number in figures.items() if name != BESIDES))
        for phase in PHASES:
            sides[phase].append(factor * figures.get(phase, 0))
    results.record(what, sides, unit=unit)


def switched(served: Served, folder: Path, number: signal.Signals, work: Callable[[], None]) -> list[dict[str, float]]:
    """Do work while a profiler of the service is on; return what it found."""
    for what in (work, None):
        os.kill(served.pid, number)
        path, until_s = folder / number.name, time.monotonic() + TIMEOUT_S
        while not path.exists():
            if time.monotonic() > until_s:
                raise RuntimeError(f"the service did not react to {number.name} within {TIMEOUT_S:g} s")
            time.sleep(0.01)
        content = path.read_bytes()
        path.unlink()
        if what:
            what()
    return msgspec.json.decode(content, type=list[dict[str, float]])


def serve(folder: Path, arguments: list[str]) -> None:
    """Run a service whose profilers start and stop at signals."""
    from replaybuf.cli.main import main as replaybuf

    for number, profiler in ((signal.SIGUSR1, CallCounter), (signal.SIGUSR2, Sampler)):
        signal.signal(number, Switch(folder, number, profiler).on_signal)
    replaybuf(arguments)


if __name__ == "__main__":
    if sys.argv[2:3] == ["serve"]:
        serve(Path(sys.argv[1]), sys.argv[2:])
    else:
        main()
