"""Fuzz the decoders by coverage, each for its share of the time: `python -m tests.fuzz --seconds 60 [--target frame]`.

Needs atheris (`make fuzz` installs it). What a fuzzer has learned is kept in `.fuzz/`; an input that breaks a target is
written there and named. Put it into `tests/fuzz/corpus/<target>/`, where a test replays it from then on.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

KEPT = Path(".fuzz")
CORPUS = Path(__file__).parent / "corpus"
NAMES = ("head", "frame", "raw_frame", "body", "json", "batch", "entries", "ticket")
DECODERS = [
    "replaybuf.wire.batch",
    "replaybuf.wire.column.columns",
    "replaybuf.kernel.state.tickets",
    "replaybuf.wire.frame",
    "replaybuf.wire.group",
    "replaybuf.service.http.guard.connection",
    "replaybuf.service.http.body.requests",
    "replaybuf.wire.decoding",
    "replaybuf.store.entries",
]
LARGEST_INPUT_BYTES = 8192
LARGEST_MEMORY_MB = 1024
SLOWEST_INPUT_S = 10
START_S = 60


def main() -> None:
    """Fuzz each target in a process of its own; exit with 1 if one broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--target", choices=NAMES, action="append", help="repeat for several; all by default")
    parser.add_argument("--within", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.within:
        fuzz(args.within, args.seconds)
        return
    names = args.target or NAMES
    broken = [name for name in names if not report(name, max(1, args.seconds // len(names)))]
    if broken:
        sys.exit(f"BAD: {', '.join(broken)} broke; the inputs are in {KEPT}/")
    print(f"GOOD: {len(names)} targets, {args.seconds} s, nothing broke")


def report(name: str, seconds: int) -> bool:
    """Fuzz one target and print a line about it; False = it broke."""
    command = [sys.executable, "-m", "tests.fuzz", "--within", name, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + START_S, check=False)
    runs = re.findall(r"#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)", done.stderr)
    units, edges, features, inputs = runs[-1] if runs else ("0",) * 4
    outcome = "broken" if done.returncode else "sound"
    print(
        f"{name:10} {seconds:4} s {units:>9} runs {edges:>5} edges {features:>5} features {inputs:>4} inputs", outcome
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return not done.returncode


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=DECODERS):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    kept, seeds = KEPT / name, KEPT / "seeds" / name
    for folder in (kept, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (seeds / f"seed-{number}").write_bytes(seed)
    folders = [folder for folder in (kept, seeds, CORPUS / name) if folder.is_dir()]
    options = {
        "max_total_time": seconds,
        "max_len": LARGEST_INPUT_BYTES,
        "rss_limit_mb": LARGEST_MEMORY_MB,
        "timeout": SLOWEST_INPUT_S,
        "artifact_prefix": f"{KEPT}/{name}-",
    }
    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), *map(str, folders)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
