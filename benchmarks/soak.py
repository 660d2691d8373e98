"""Measure memory and streams over a long run with tickets, batches, checkpoints and rewinds.

    python benchmarks/soak.py --groups 1000000            # every group used once, by tickets
    python benchmarks/soak.py --groups 300000 --rewinds   # own ids, staleness up to 3, three checkpoints, rewinds
    # `replaybuf stage` adds a column, most frames are spilled, and a short history is trimmed from the first minutes on
    python benchmarks/soak.py --minutes 30 --stage --groups-per-batch 200 --history-groups 2000

Groups are tiny (2 rollouts of 5 tokens), so the bookkeeping of a group is what grows. Producer and trainer are threads
of this process; Valkey, service and stage are more processes. Each line prints the memory of Redis and of the service,
and the lengths of streams and tables. At the end come the medians of each sixth of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
from served import Served

from replaybuf.client.client import Client
from replaybuf.kernel.decide.trimming import KEPT_GROUPS
from replaybuf.store import keys
from replaybuf.wire.contract import Attachment, WaitingAnswer
from replaybuf.wire.group import Group, GroupJson, RolloutJson, group_from_json

RUN = "soak"
BODY_GROUPS = 500
"""Most groups of one append; half a batch where that is less."""
PARTS = 6
"""Of the time, for the medians at the end: five minutes of a soak of 30."""
KEEP_CHECKPOINTS = 3
REWIND_STEPS = 20
"""With --rewinds: steps between two rewinds by two steps."""
RETRY_S = 30.0
BACKLOG_BATCHES = 2
"""Batches of groups that wait, of producers with own ids."""
STAGED_STALENESS = 8
"""With --stage: one batch more of groups is live, so that most of them leave memory."""
GROUP_BYTES = 1_500
"""With --stage: frame of a group with its column. One batch stays in Redis."""
COLUMN = "ref_logprobs"
FUNCTION = """
def reference(group):
    return [[-1.0] * len(rollout.completion_ids) for rollout in group.rollouts]
"""


def main() -> None:
    """Run the soak and print the table over time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--groups-per-batch", type=int, default=1_000)
    parser.add_argument("--rewinds", action="store_true")
    parser.add_argument("--stage", action="store_true", help="add a column to every group, and spill frames")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--history-groups", type=int, default=KEPT_GROUPS, help="freed groups that stay visible")
    parser.add_argument("--samples", type=int, default=60)
    options = parser.parse_args()
    history = ("--history-groups", str(options.history_groups))
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data", *history) as server:
        soak = Soak(server, options, Path(folder))
        with soak.stage() if options.stage else contextlib.nullcontext():
            soak.work()


class Soak:
    """One run from its first group to its last."""

    def __init__(self, server: Served, options: Any, folder: Path) -> None:
        self.server = server
        self.options = options
        self.batch = options.groups_per_batch
        self.folder = folder
        self.client = Client(server.url, RUN, retry_for_s=RETRY_S)
        self.client.put_run(self.config())
        self.sent = 0
        self.stop = False
        self.rewound: set[int] = set()
        self.step_s: list[float] = []
        self.rows: list[tuple[float, dict[str, float]]] = []

    def config(self) -> dict[str, Any]:
        """Return the configuration of the run."""
        batch = {"groups_per_batch": self.batch, "tokens_per_batch": None}
        options: dict[str, Any] = {"max_staleness": 3 if self.options.rewinds else 1}
        config: dict[str, Any] = {"strategy": {"name": "one-step-off-policy", "options": options}, "batch": batch}
        if self.options.stage:
            options |= {"max_staleness": STAGED_STALENESS, "requires": [COLUMN]}
            in_memory = self.batch * GROUP_BYTES
            config["limits"] = {"max_group_bytes": in_memory // 16, "max_bytes_in_memory": in_memory}
            config["spill"] = {"url": f"file://{self.folder}/spill"}
        return config

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Run `replaybuf stage` for the column that the strategy requires."""
        (self.folder / "soak_stage.py").write_text(FUNCTION)
        command = [sys.executable, "-m", "replaybuf", "stage", RUN, "--column", COLUMN, "--url", self.server.url]
        command += ["--function", "soak_stage:reference"]
        path = os.pathsep.join([str(self.folder), *sys.path])
        with (self.folder / "stage.log").open("w") as log:
            stage = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log)
        try:
            yield
        finally:
            stage.kill()
            stage.wait(RETRY_S)

    def work(self) -> None:
        """Produce and train until all groups are used or the time is over."""
        trainer = self.client.attach(resume_step=0)
        begun, due, step = time.monotonic(), 0.0, 0
        ends = begun + 60 * self.options.minutes
        with ThreadPoolExecutor(1) as pool:
            producing = pool.submit(self.produce)
            while step < self.options.groups // self.batch and time.monotonic() < ends:
                at = time.monotonic()
                body = self.client.fetch_batch(step, trainer.epoch, 0, wait_ms=10_000)
                if isinstance(body, WaitingAnswer):
                    if producing.done():
                        break
                    continue
                trainer, step = self.train(trainer, step)
                self.step_s.append(time.monotonic() - at)
                progress = max(self.sent / self.options.groups, (time.monotonic() - begun) / (ends - begun))
                if progress >= due:
                    self.sample(time.monotonic() - begun)
                    due += 1 / self.options.samples
            self.stop = True
            producing.result()
        self.sample(time.monotonic() - begun)
        self.summarize()
        rate = self.sent / (time.monotonic() - begun)
        step_s = statistics.median(self.step_s) if self.step_s else math.nan
        print(f"{rate:,.0f} groups/s; a step of {self.batch} groups {step_s:.2f} s (median)")

    def produce(self) -> None:
        """Fill the pool: by tickets, or with own ids to a backlog of batches."""
        backlog, count = BACKLOG_BATCHES * self.batch, min(BODY_GROUPS, self.batch // 2)
        with Client(self.server.url, RUN, retry_for_s=RETRY_S) as client:
            while self.sent < self.options.groups and not self.stop:
                state = client.get_run()  # updates the published version that the client checks groups against
                plain = plain_group(state.published_version)
                if not self.options.rewinds:
                    tickets = client.take_tickets("soak", count, wait_ms=1000).tickets
                    made = [msgspec.structs.replace(plain, ticket=ticket.ticket) for ticket in tickets]
                elif state.groups.live < backlog:
                    ids = [f"soak/{self.sent + k:09d}" for k in range(count)]
                    made = [msgspec.structs.replace(plain, group_id=group_id) for group_id in ids]
                else:
                    client.get_policy(after=plain.policy_version, wait_ms=1000)
                    continue
                if made:
                    self.send(client, made)

    def send(self, client: Client, groups: list[Group]) -> None:
        """Append groups; make those of a rewound version again. A repeated call finds some of its groups stored."""
        results = client.append(groups)
        refused = [result for result in results if result.status == "rejected"]
        if refused and not self.options.rewinds:
            raise RuntimeError(f"{len(refused)} of {len(results)} groups were not stored; the first: {refused[0]}")
        self.sent += len(results)

    def train(self, trainer: Attachment, step: int) -> tuple[Attachment, int]:
        """Take one step, or return two steps."""
        self.client.ack(step, trainer.epoch)
        self.client.publish_policy(step + 1, trainer.epoch)
        self.client.checkpoint(step + 1, trainer.epoch, keep=KEEP_CHECKPOINTS)
        if self.options.rewinds and (step + 1) % REWIND_STEPS == 0 and step not in self.rewound:
            self.rewound.add(step)
            mode: Literal["redeliver", "resample"] = "redeliver" if (step + 1) % (2 * REWIND_STEPS) else "resample"
            return self.client.attach(resume_step=step - 1, on_resume=mode), step - 1
        return trainer, step + 1

    def sample(self, elapsed_s: float) -> None:
        """Print the current state."""
        with self.server.redis() as client:
            memory = client.info("memory")["used_memory"]
            row = {
                "groups": self.sent,
                "redis MB": memory / 1e6,
                "service MB": self.server.rss_bytes / 1e6,
                "index entries": client.xlen(keys.index(RUN)),
                "ledger entries": client.xlen(keys.ledger(RUN)),
                "ids": client.hlen(keys.group_ids(RUN)),
                "snapshot kB": client.strlen(keys.snapshot(RUN)) / 1e3,
                "keys": client.dbsize(),
                "spill files": len(sizes := spilled_bytes(self.folder / "spill")),
                "spilled MB": sum(sizes) / 1e6,
            }
        if not self.rows:
            print_row("s", list(row))
            print_row("---", ["---"] * len(row))
        self.rows.append((elapsed_s, row))
        print_figures(f"{elapsed_s:.0f}", row)

    def summarize(self) -> None:
        """Print the medians of each part of the time."""
        part_s = self.rows[-1][0] / PARTS
        for part in range(PARTS):
            from_s, until_s = part * part_s, (part + 1) * part_s
            rows = [row for at_s, row in self.rows if from_s <= at_s <= until_s]
            if rows:
                medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
                print_figures(f"median of {from_s:.0f} to {until_s:.0f}", medians)


def print_figures(name: str, figures: dict[str, float]) -> None:
    """Print a row of the table: numbers of things whole, sizes with one decimal."""
    print_row(name, [f"{value:,.{1 if unit.endswith('B') else 0}f}" for unit, value in figures.items()])


def print_row(name: str, cells: list[str]) -> None:
    """Print a row of a Markdown table."""
    print("| " + " | ".join([name, *cells]) + " |", flush=True)


def spilled_bytes(folder: Path) -> list[int]:
    """Return the sizes of the files in a spill folder, without those of folders; some may vanish meanwhile."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                sizes.append(status.st_size)
    return sizes


def plain_group(version: int) -> Group:
    """Make a group of two rollouts with five tokens each."""
    filled: dict[str, Any] = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "inference_logprobs": [-0.5] * 3}
    rollouts = [RolloutJson(**filled, reward=float(k), advantage=2.0 * k - 1.0) for k in range(2)]
    return group_from_json(GroupJson(prompt_id="soak", policy_version=version, rollouts=rollouts))


if __name__ == "__main__":
    main()
