"""Seconds of slime's `generate` on a run, beside slime's own buffer with the same samples, in turns.

    PYTHONPATH=. .venv-adapters/slime/bin/python adapters/slime/tests/step_time.py --pairs 5

Both go through slime's conversion and schedule. slime's buffer is a list in the memory of the process. Nothing trains
in between, so a run has no time to prefetch: a training sees less.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

from slime_loop import manager_of
from slime_source import SOURCE

from replaybuf.client import Client
from replaybuf.wire.group import Group
from tests.measured_groups import CONFIG, GROUPS, SIZE, compare, large_group, measuring, store

STEPS, WARM_UP = 10, 2


def from_buffer(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Take the groups of a rollout from slime's buffer: its rollout function, without the engines."""
    from slime.rollout.base_types import RolloutFnTrainOutput

    return RolloutFnTrainOutput(data_source.get_samples(args.rollout_batch_size))


class Sides:
    """A run and slime's buffer with the same samples."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._source = url, folder, SOURCE.checkout()
        self._groups: list[Group] = [large_group(number) for number in range(GROUPS * STEPS)]
        manager = self._manager("samples")
        self._samples = [
            group
            for step in range(STEPS)
            for group in manager.generate_rollout(manager.args, step, manager.data_source).samples
        ]
        manager.data_source.close()

    def run(self, pair: int) -> float:
        """Return the seconds per step of a run."""
        manager = self._manager(f"run-{pair}")
        try:
            return self._time(manager)
        finally:
            manager.data_source.close()

    def own(self, pair: int) -> float:
        """Return the seconds per step of slime's buffer."""
        from slime.rollout.data_source import RolloutDataSourceWithBuffer

        manager = self._manager(f"own-{pair}")
        manager.data_source.close()
        vars(manager.args).update(prompt_data=None, buffer_filter_path=None)
        manager.data_source, manager.generate_rollout = RolloutDataSourceWithBuffer(manager.args), from_buffer
        manager.data_source.add_samples(copy.deepcopy(self._samples))
        return self._time(manager)

    def _manager(self, name: str) -> Any:
        with Client(self._url, name) as client:
            client.put_run(CONFIG)
            store(client, self._groups)
        sizes = {"rollout_batch_size": GROUPS, "n_samples_per_prompt": SIZE, "num_rollout": STEPS}
        at = {"replaybuf_url": self._url, "replaybuf_run": name, "save": str(self._folder / name)}
        manager = manager_of(self._source, sizes | at)
        manager.data_source.load(-1)
        return manager

    @staticmethod
    def _time(manager: Any) -> float:
        for step in range(STEPS):
            if step == WARM_UP:
                began_s = time.perf_counter()
            manager.generate(step)
        return (time.perf_counter() - began_s) / (STEPS - WARM_UP)


def main() -> None:
    """Start a service and compare."""
    with measuring(str(__doc__)) as (url, folder, pairs):
        sides = Sides(url, folder)
        compare(pairs, {"run": sides.run, "slime's own buffer": sides.own})


if __name__ == "__main__":
    main()
