"""Measure memory and streams over a long run with tickets, batches, checkpoints and rewinds.

    python benchmarks/soak.py --groups 1000000            # every group used once, by tickets
    python benchmarks/soak.py --groups 300000 --rewinds   # own ids, staleness up to 3, three checkpoints, rewinds

Groups are tiny (2 rollouts of 5 tokens), so the bookkeeping of a group is what grows. Producer and trainer are threads
of this process; Valkey and service are two more processes. Each line prints the memory of Redis and of the service,
and the lengths of streams and tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from served import Served

from replaybuf.client.client import Client
from replaybuf.store import keys
from replaybuf.wire.contract import Attachment, WaitingAnswer
from replaybuf.wire.group import Group, GroupJson, RolloutJson, group_from_json

RUN = "soak"
BODY_GROUPS = 500
KEEP_CHECKPOINTS = 3
REWIND_STEPS = 20
"""With --rewinds: steps between two rewinds by two steps."""
RETRY_S = 30.0


def main() -> None:
    """Run the soak and print the table over time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--groups-per-batch", type=int, default=1_000)
    parser.add_argument("--rewinds", action="store_true")
    parser.add_argument("--samples", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "data") as server:
        Soak(server, options).work()


class Soak:
    """One run from its first group to its last."""

    def __init__(self, server: Served, options: Any) -> None:
        self.server = server
        self.options = options
        self.batch = options.groups_per_batch
        self.client = Client(server.url, RUN, retry_for_s=RETRY_S)
        self.sent = 0
        self.stop = False
        self.rewound: set[int] = set()
        self.step_s: list[float] = []
        self.lines: list[list[str]] = []

    def work(self) -> None:
        """Produce and train until all groups are used."""
        staleness = 3 if self.options.rewinds else 1
        strategy = {"name": "one-step-off-policy", "options": {"max_staleness": staleness}}
        self.client.put_run({"strategy": strategy, "batch": {"groups_per_batch": self.batch, "tokens_per_batch": None}})
        trainer = self.client.attach(resume_step=0)
        begun, due, step = time.monotonic(), 0, 0
        with ThreadPoolExecutor(1) as pool:
            producing = pool.submit(self.produce)
            while step < self.options.groups // self.batch:
                at = time.monotonic()
                body = self.client.fetch_batch(step, trainer.epoch, 0, wait_ms=10_000)
                if isinstance(body, WaitingAnswer):
                    if producing.done():
                        break
                    continue
                trainer, step = self.train(trainer, step)
                self.step_s.append(time.monotonic() - at)
                if self.sent >= due:
                    self.sample(time.monotonic() - begun)
                    due += self.options.groups // self.options.samples
            self.stop = True
            producing.result()
        self.sample(time.monotonic() - begun)
        rate = self.sent / (time.monotonic() - begun)
        print(f"{rate:,.0f} groups/s; a step of {self.batch} groups {statistics.median(self.step_s):.2f} s (median)")

    def produce(self) -> None:
        """Fill the pool: by tickets, or with own ids to two batches."""
        with Client(self.server.url, RUN, retry_for_s=RETRY_S) as client:
            while self.sent < self.options.groups and not self.stop:
                state = client.get_run()  # updates the published version that the client checks groups against
                plain = plain_group(state.published_version)
                if not self.options.rewinds:
                    tickets = client.take_tickets("soak", BODY_GROUPS, wait_ms=1000).tickets
                    made = [dataclasses.replace(plain, ticket=ticket.ticket) for ticket in tickets]
                elif state.groups.live < 2 * self.batch:
                    ids = [f"soak/{self.sent + k:09d}" for k in range(BODY_GROUPS)]
                    made = [dataclasses.replace(plain, group_id=group_id) for group_id in ids]
                else:
                    client.get_policy(after=plain.policy_version, wait_ms=1000)
                    continue
                if made:
                    self.send(client, made)

    def send(self, client: Client, groups: list[Group]) -> None:
        """Append groups; make those of a rewound version again."""
        results = client.append(groups)
        refused = [result for result in results if result.status != "stored"]
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
                "groups": f"{self.sent:,}",
                "s": f"{elapsed_s:.0f}",
                "redis MB": f"{memory / 1e6:.1f}",
                "service MB": f"{self.server.rss_bytes / 1e6:.1f}",
                "index entries": f"{client.xlen(keys.index(RUN)):,}",
                "ledger entries": f"{client.xlen(keys.ledger(RUN)):,}",
                "ids": f"{client.hlen(keys.group_ids(RUN)):,}",
                "snapshot kB": f"{client.strlen(keys.snapshot(RUN)) / 1e3:.0f}",
                "keys": f"{client.dbsize():,}",
            }
        if not self.lines:
            print("| " + " | ".join(row) + " |")
            print("|" + "---|" * len(row))
        self.lines.append(list(row.values()))
        print("| " + " | ".join(row.values()) + " |", flush=True)


def plain_group(version: int) -> Group:
    """Make a group of two rollouts with five tokens each."""
    filled: dict[str, Any] = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "inference_logprobs": [-0.5] * 3}
    rollouts = [RolloutJson(**filled, reward=float(k), advantage=2.0 * k - 1.0) for k in range(2)]
    return group_from_json(GroupJson(prompt_id="soak", policy_version=version, rollouts=rollouts))


if __name__ == "__main__":
    main()
