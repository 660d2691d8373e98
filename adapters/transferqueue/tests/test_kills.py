"""kill -9 of the driver, all Ray processes and Valkey at random moments: nothing acknowledged is lost or mixed up."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.valkeys import Valkey

DRIVER = Path(__file__).parent / "killed_driver.py"


@contextlib.contextmanager
def driver(round_: int, valkey: Valkey, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the driver; at the end it and all that it started are killed."""
    arguments = [str(folder / "journal"), str(folder / "checkpoints"), str(round_), valkey.url]
    with (folder / "driver.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), *arguments], stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
        )
    try:
        yield process
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, 30)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.timeout(7200)
def test_nothing_acknowledged_is_lost_or_mixed_up(valkey: Valkey, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "checkpoints").mkdir()
    kills, seed, restored = int(pytestconfig.getoption("--kills")), int(pytestconfig.getoption("--seed")), 0
    rng = random.Random(seed)
    for round_ in range(1000 * seed, 1000 * seed + kills + 1):
        with driver(round_, valkey, tmp_path) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("restored"), (tmp_path / "driver.log").read_text()[-4000:]
            restored += int(line.split()[1])
            print(f"round {round_}: {line.strip()}", flush=True)
            if round_ == 1000 * seed + kills:
                break
            # When and in which order is the point of the test.
            time.sleep(rng.uniform(0.0, 2.0))
            if rng.random() < 0.3:  # the driver waits for a Valkey that comes back, and goes on
                valkey.kill()
                valkey.start()
                time.sleep(rng.uniform(0.0, 1.0))
            assert process.poll() is None, (tmp_path / "driver.log").read_text()[-4000:]
            if rng.random() < 0.5:
                valkey.kill()
        if not Path(valkey.socket_path).exists() or valkey._server is None:
            valkey.start()
    journal = (tmp_path / "journal").read_text().splitlines()
    puts, saves = (sum(line.startswith(word) for line in journal) for word in ("put ", "save "))
    inside = sum(after.startswith("restored") and before.startswith("begin-") for before, after in pairwise(journal))
    print(
        f"\n{kills} kills, {inside} of them inside a put or clear, seed {seed}: {puts} acknowledged puts, {saves} "
        f"checkpoints, {restored} samples restored, 0 wrong or lost"
    )
    assert puts
