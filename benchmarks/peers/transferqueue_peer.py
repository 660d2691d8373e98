"""One turn of TransferQueue with its default storage: two storage units and a controller, each a Ray actor.

A group is one row with dense columns: all groups have equal lengths, which is the cheapest form for it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import numpy as np
import ray
import torch
import transfer_queue
from peer import Columns, main
from tensordict import TensorDict

TASK = "train"


class TransferQueue:
    """A client of a queue of its own, with one partition."""

    packages = ("TransferQueue", "ray", "tensordict", "torch")

    def __init__(self, groups: int) -> None:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._fields: list[str] = []
        self._number = itertools.count()

    def insert(self, groups: Sequence[Columns]) -> None:
        """Put groups as rows."""
        self._fields = list(groups[0])
        stacked = {name: torch.from_numpy(np.stack([columns[name] for columns in groups])) for name in self._fields}
        keys = [f"group-{next(self._number)}" for _ in groups]
        transfer_queue.kv_batch_put(keys, TASK, TensorDict(stacked, batch_size=len(groups)))

    def get(self, count: int) -> int:
        """Get the next rows."""
        meta = self._client.get_meta(
            data_fields=self._fields, batch_size=count, partition_id=TASK, mode="fetch", task_name=TASK
        )
        data = self._client.get_data(meta)
        return sum(tensor.nbytes for tensor in data.values())


if __name__ == "__main__":
    main(TransferQueue)
    sys.stdout.flush()
    transfer_queue.close()
    ray.shutdown()
