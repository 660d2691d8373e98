"""Seconds of prime-rl's trainer for its data on a run, beside prime-rl's own packing and sender, in turns.

    PYTHONPATH=. .venv-adapters/prime-rl/bin/python adapters/prime-rl/tests/step_time.py --pairs 5

First from a complete batch to its readable files: the append of the last group is answered, or the orchestrator has its
samples in memory. Then seconds per step of a trainer that only reads, with every group at hand beforehand.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prime_source import SOURCE, load
from prime_trainer import RANKS, PrimeTrainer

from replaybuf.client import Client
from replaybuf.wire.group import Group
from replaybuf_prime_rl import Sidecar, SidecarOptions
from tests.measured_groups import CONFIG, GROUPS, PROMPT_TOKENS, SIZE, TOKENS, compare, large_group, measuring, store

STEPS, WARM_UP = 12, 2
SEQ_LEN: int = CONFIG["batch"]["seq_len"]


class Own:
    """prime-rl's packing and sender, as its orchestrator calls them, in the place of the sidecar."""

    def __init__(self, output_dir: Path, groups: list[Group]) -> None:
        from prime_rl.trainer.batch import build_bin_cost, prepare_batch
        from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchSender

        self._prepare, self._cost = prepare_batch, build_bin_cost(None)
        self._sender = FileSystemMicroBatchSender(output_dir, RANKS, 1)
        self._samples = [samples_of(groups[at : at + GROUPS]) for at in range(0, len(groups), GROUPS)]

    def send(self, step: int) -> None:
        """Pack and write the samples of a step."""
        samples = self._samples[step]
        grid = self._prepare(rollouts=samples, seq_len=SEQ_LEN, num_train_workers=RANKS, bin_cost=self._cost)
        asyncio.run(self._sender.send(grid))


def samples_of(groups: list[Group]) -> list[Any]:
    """Return the samples of a batch as the orchestrator has them: lists of Python."""
    from prime_rl.transports.rollouts.types import TrainingSample

    samples = []
    for group in groups:
        for rollout in range(SIZE):
            prompt = group.prompt_ids.reshape(SIZE, PROMPT_TOKENS)[rollout].tolist()
            completion = group.completion_ids.reshape(SIZE, TOKENS)[rollout].tolist()
            logprobs = group.inference_logprobs.reshape(SIZE, TOKENS)[rollout].tolist()
            sample = TrainingSample(
                token_ids=prompt + completion,
                mask=[False] * PROMPT_TOKENS + [True] * TOKENS,
                logprobs=[0.0] * PROMPT_TOKENS + logprobs,
                temperatures=[1.0] * (PROMPT_TOKENS + TOKENS),
                env_name="measured",
                advantages=[1.0] * (PROMPT_TOKENS + TOKENS),
            )
            samples.append(sample)
    return samples


@contextmanager
def fed(url: str, run: str, output_dir: Path) -> Iterator[Client]:
    """Feed a folder from a new run, in a thread."""
    with Client(url, run) as client, Client(url, run) as own:
        client.put_run(CONFIG)
        sidecar = Sidecar(client, SidecarOptions(output_dir=output_dir, dp_world_size=RANKS))
        thread = threading.Thread(target=sidecar.run)
        thread.start()
        try:
            yield own
        finally:
            sidecar.stop()
            thread.join()


class Sides:
    """The same groups by either way."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._prime_data = url, folder, load(SOURCE.checkout())
        self._groups = [large_group(number) for number in range(GROUPS * STEPS)]

    def delay_of_run(self, pair: int) -> float:
        """Return the median seconds from the last group of a batch to its readable files."""
        with fed(self._url, f"delay-{pair}", self._folder / f"delay-{pair}") as client:

            def complete(step: int) -> float:
                groups = self._groups[GROUPS * step : GROUPS * (step + 1)]
                store(client, groups[:-1])
                store(client, groups[-1:])
                return time.perf_counter()

            return self._delay(self._folder / f"delay-{pair}", complete)

    def own_delay(self, pair: int) -> float:
        """Return the median seconds of packing and writing the samples of a batch."""
        output_dir = self._folder / f"own-delay-{pair}"
        own = Own(output_dir, self._groups)

        def complete(step: int) -> float:
            began_s = time.perf_counter()
            own.send(step)
            return began_s

        return self._delay(output_dir, complete)

    def step_of_run(self, pair: int) -> float:
        """Return the seconds per step of a trainer that only reads."""
        with fed(self._url, f"step-{pair}", self._folder / f"step-{pair}") as client:
            for at in range(0, len(self._groups), GROUPS):
                store(client, self._groups[at : at + GROUPS])
            return self._steps(self._folder / f"step-{pair}", lambda _: None)

    def own_step(self, pair: int) -> float:
        """Return the seconds per step of a trainer that only reads what prime-rl's code packs and writes."""
        output_dir = self._folder / f"own-step-{pair}"
        return self._steps(output_dir, Own(output_dir, self._groups).send)

    def _delay(self, output_dir: Path, complete: Callable[[int], float]) -> float:
        trainer, delays_s = PrimeTrainer(self._prime_data, output_dir), []
        for step in range(STEPS):
            last = output_dir / "rollouts" / f"step_{step + 1}" / f"rank_{RANKS - 1}.bin"
            began_s = complete(step)
            while not last.exists():
                time.sleep(0.0005)
            delays_s.append(time.perf_counter() - began_s)
            trainer.train(lambda: None)
        return statistics.median(delays_s[WARM_UP:])

    def _steps(self, output_dir: Path, before: Callable[[int], None]) -> float:
        trainer = PrimeTrainer(self._prime_data, output_dir)
        for step in range(STEPS):
            if step == WARM_UP:
                began_s = time.perf_counter()
            before(step)
            trainer.train(lambda: None)
        return (time.perf_counter() - began_s) / (STEPS - WARM_UP)


def main() -> None:
    """Start a service and compare."""
    with measuring(str(__doc__)) as (url, folder, pairs):
        sides = Sides(url, folder)
        print("complete batch to readable files")
        compare(pairs, {"run": sides.delay_of_run, "prime-rl's own sender": sides.own_delay})
        print("step of a trainer that only reads")
        compare(pairs, {"run": sides.step_of_run, "prime-rl's own sender": sides.own_step})


if __name__ == "__main__":
    main()
