"""One turn of Reverb, whose server is another process. A group is one item, sampled once, first in, first out."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Sequence
from multiprocessing.connection import Connection

import reverb
from peer import Columns, main

TABLE = "groups"


class Reverb:
    """A client of one server with one queue."""

    packages = ("dm-reverb", "tensorflow")

    def __init__(self, groups: int) -> None:
        here, there = mp.get_context("spawn").Pipe()
        mp.get_context("spawn").Process(target=serve, args=(there, groups), daemon=True).start()
        self._client = reverb.Client(f"localhost:{here.recv()}")

    def insert(self, groups: Sequence[Columns]) -> None:
        """Insert one group by `insert`, several by one writer."""
        if len(groups) == 1:
            self._client.insert(list(groups[0].values()), {TABLE: 1.0})
            return
        with self._client.writer(max_sequence_length=1) as writer:
            for columns in groups:
                writer.append(list(columns.values()))
                writer.create_item(TABLE, num_timesteps=1, priority=1.0)

    def get(self, count: int) -> int:
        """Sample a batch."""
        return sum(
            column.nbytes for sample in self._client.sample(TABLE, num_samples=count) for column in sample[0].data
        )


def serve(port: Connection, groups: int) -> None:
    """Serve until killed; send the port."""
    server = reverb.Server(tables=[reverb.Table.queue(TABLE, max_size=groups)])
    port.send(server.port)
    server.wait()


if __name__ == "__main__":
    main(Reverb)
