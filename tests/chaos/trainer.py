"""A trainer that is killed, comes back, and never trusts what it gets: `python -m tests.chaos.trainer`.

The order of a step is the contract's: fetch all ranks, (prefetch,) ack, publish, now and then a checkpoint. What it
resumes at stands in a small file of its own, renamed into place. Now and then it asks for the same batch once more, or
at one server after the other, or writes with an epoch that is over. Ends on SIGTERM after the step in work; with exit
code `FENCED` where a newer trainer has the run, after a few last tries to write all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from replaybuf.client.client import Client
from replaybuf.wire.batch import Batch, MicroBatch, read_batch
from replaybuf.wire.contract import WaitingAnswer
from tests.chaos.calling import TIMEOUT_S, observed
from tests.chaos.content import checksum, priority_of, reference_of
from tests.chaos.history import OK, UNAVAILABLE, Attached, BatchAsked, Body, Recorder, Rollout, TrainerWrote
from tests.chaos.runs import adapters_of

FENCED = 3
"""Exit code of a trainer whose run was taken."""
RETRY_FOR_S = 10.0
CHECKPOINT_EVERY_STEPS = 4
ZOMBIE_TRIES = 5
REATTACHES = 0.03
"""Share of steps after which the trainer resumes anew, as a job does that was started again in its process."""


class Place(msgspec.Struct, frozen=True):
    """Steps where training may resume: the newest recorded checkpoints, ascending."""

    checkpoints: tuple[int, ...] = (0,)


class TrainerActor:
    """Trains one run. `keep` checkpoints stay resumable, it remembers all but the oldest of them.

    The file lags the service by at most one checkpoint, so what it names is always among the kept ones.
    """

    def __init__(
        self,
        urls: str,
        run: str,
        place: Path,
        recorder: Recorder,
        rng: random.Random,
        keep: int,
        adapters: Mapping[str, Mapping[str, int]],
    ) -> None:
        self._run, self._recorder, self._rng, self._keep = run, recorder, rng, keep
        self._place = place
        self._kept: tuple[int, ...] = ()
        self._number = self._refused = 0
        self._client = Client(urls, run, timeout_s=TIMEOUT_S, retry_for_s=RETRY_FOR_S)
        self._each = [Client(url, run, timeout_s=TIMEOUT_S) for url in urls.split(",")]
        self._epoch, self._step, self._world, self._look_ahead = 0, 0, 1, 0
        self._trained: list[str] = []
        self._adapters, self._completed = adapters, dict[str, int]()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End after the step in work."""
        self._stopping.set()

    def train(self) -> int:
        """Train until stopped or fenced; return the exit code."""
        self._attach_until_answered()
        if self._step == 0:  # step 0 is a checkpoint too, and the first to be dropped
            self._write_until_answered("checkpoint", 0)
        while not self._stopping.is_set():
            if not self._train_step() and not self._stopping.is_set():
                return self._write_as_zombie()
            if self._rng.random() < REATTACHES:
                self._attach_until_answered()
        return 0

    # ------------------------------------------------------------------ life

    def _attach_until_answered(self) -> None:
        while not self._attach(self._read_place()) and not self._stopping.wait(0.3):
            pass

    def _attach(self, place: Place) -> bool:
        # Refused twice: a late attach of a trainer that stood still has voided the checkpoints.
        resume_step = self._rng.choice(place.checkpoints) if self._refused < 2 else None
        # Before the call: it may take effect without an answer, and drop the later checkpoints.
        self._number += 1
        self._kept = tuple(step for step in place.checkpoints if resume_step is None or step <= resume_step)
        self._write_place(Place(self._kept))
        self._world = self._rng.choice((1, 2, 2, 3))
        on_resume: Literal["redeliver", "resample"] = "resample" if self._rng.random() < 0.25 else "redeliver"
        done = observed(self._run, self._client, lambda: self._client.attach(self._world, resume_step, on_resume))
        asked: dict[str, Any] = {"resume_step": resume_step, "on_resume": on_resume, "world": self._world}
        if done.result is None:
            self._recorder.write(Attached(**done.seen, **asked))
            if done.seen["outcome"] == "wrong-step":  # nothing took effect, and the trainer before has gone on since
                self._place_file().unlink()
                self._refused += 1
            return False
        got = done.result
        self._recorder.write(Attached(**done.seen, **asked, epoch=got.epoch, step=got.step, generation=got.generation))
        self._epoch, self._step, self._look_ahead = got.epoch, got.step, got.look_ahead
        if resume_step is None:
            self._kept = (got.step,)
            self._write_place(Place(self._kept))
        self._refused = 0
        return True

    def _write_as_zombie(self) -> int:
        """Keep writing with the fenced epoch."""
        for _ in range(ZOMBIE_TRIES):
            self._write("ack", self._epoch, self._step)
            self._write("publish", self._epoch, self._step + 1, next(iter(self._adapters), ""))
            self._write("checkpoint", self._epoch, self._step)
            time.sleep(self._rng.uniform(0.01, 0.1))
        return FENCED

    def _read_place(self) -> Place:
        """Read the newest file. Every attach begins a new file, so a fenced trainer cannot overwrite a valid one."""
        places = sorted(self._place.parent.glob(f"{self._place.name}-*.json"))
        self._number = int(places[-1].stem.rpartition("-")[2]) if places else 0
        return msgspec.json.decode(places[-1].read_bytes(), type=Place) if places else Place()

    def _place_file(self) -> Path:
        return self._place.with_name(f"{self._place.name}-{self._number:06d}.json")

    def _write_place(self, place: Place) -> None:
        path = self._place_file()
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_bytes(msgspec.json.encode(place))
        scratch.rename(path)

    # ------------------------------------------------------------------ a step

    def _train_step(self) -> bool:
        """Train one step; return False if a newer trainer has the run, or at the end."""
        step, self._trained = self._step, []
        for rank in range(self._world):
            if not self._fetch(step, rank):
                return False
        self._ask_again(step)
        self._stopping.wait(self._rng.uniform(0.005, 0.03))  # training
        if self._look_ahead and self._rng.random() < 0.5:
            self._ask(self._client, step + 1, self._rng.randrange(self._world))
        if not self._write_until_answered("ack", step):
            return False
        self._step = step + 1
        if not self._publish(step):
            return False
        if self._step % CHECKPOINT_EVERY_STEPS == 0 and not self._checkpoint():
            return False
        if self._epoch > 1 and self._rng.random() < 0.1:
            kind = self._rng.choice(("ack", "publish", "checkpoint"))
            self._write(kind, self._epoch - 1, self._step, next(iter(self._adapters), ""))
        return True

    def _publish(self, step: int) -> bool:
        """Announce what `step` trained: the next version, or that of each adapter whose own step it completed."""
        if not self._adapters:
            return self._write_until_answered("publish", step + 1)
        versions = {
            name: (own_step + 1) // self._adapters[name]["steps_per_publish"]
            for name, own_step in self._completed.items()
        }
        return all(self._write_until_answered("publish", version, name) for name, version in versions.items())

    def _fetch(self, step: int, rank: int) -> bool:
        """Ask until the batch is there; return False if it never will be, or at the end."""
        while not self._stopping.is_set():
            asked = self._ask(self._client, step, rank)
            if asked.body:
                self._trained += [rollout.group_id for rollout in asked.body.rollouts]
                self._completed = asked.body.completed
                return True
            if asked.outcome != OK and asked.outcome not in UNAVAILABLE:
                return False
            if asked.waiting is None:
                self._stopping.wait(0.1)
        return False

    def _ask_again(self, step: int) -> None:
        """Ask again for a served part, at any rank and server: the body must be the same."""
        if self._rng.random() < 0.3:
            client = self._rng.choice([self._client, *self._each])
            self._ask(client, step, self._rng.randrange(self._world))

    def _checkpoint(self) -> bool:
        step = self._step
        if not self._write_until_answered("checkpoint", step):
            return False
        self._kept = tuple(sorted({*self._kept, step})[-(self._keep - 1) :])
        self._write_place(Place(self._kept))
        return True

    # ------------------------------------------------------------------ calls

    def _ask(self, client: Client, step: int, rank: int) -> BatchAsked:
        done = observed(self._run, client, lambda: client.fetch_batch(step, self._epoch, rank, wait_ms=400))
        body = waiting = None
        if isinstance(done.result, WaitingAnswer):
            waiting = msgspec.to_builtins(done.result)
        elif done.result is not None:
            body = read_body(done.result)
        asked = BatchAsked(
            **done.seen, epoch=self._epoch, step=step, rank=rank, world=self._world, body=body, waiting=waiting
        )
        self._recorder.write(asked)
        return asked

    def _write_until_answered(self, kind: str, value: int, adapter: str = "") -> bool:
        """Repeat a write until the service decides; return whether it accepted."""
        while True:
            outcome = self._write(kind, self._epoch, value, adapter)
            if outcome not in UNAVAILABLE:
                return outcome == OK
            if self._stopping.wait(0.1):
                return False

    def _write(self, kind: str, epoch: int, value: int, adapter: str = "") -> str:
        client = self._client
        priorities = {group_id: priority_of(group_id, self._step) for group_id in self._trained}
        calls: dict[str, Callable[[], None]] = {
            "ack": lambda: client.ack(value, epoch, {"priorities": priorities}),
            "publish": lambda: client.publish_policy(value, epoch, adapter=adapter),
            "checkpoint": lambda: client.checkpoint(value, epoch, self._keep),
        }
        done = observed(self._run, client, calls[kind])
        self._recorder.write(TrainerWrote(**done.seen, kind=kind, epoch=epoch, value=value, adapter=adapter))
        return str(done.seen["outcome"])


def read_body(body: bytes) -> Body:
    """Summarise a body for the history."""
    batch = read_batch(body)
    meta = batch.meta
    return Body(
        sha256=hashlib.sha256(body).hexdigest(),
        generation=meta.generation,
        batch_id=meta.batch_id,
        digest=meta.digest,
        version=meta.version,
        batch_groups=meta.batch_groups,
        rollouts=_rollouts(batch),
        adapters=meta.adapters,
        completed={} if meta.adapters_completed is msgspec.UNSET else meta.adapters_completed,
    )


def _rollouts(batch: Batch) -> list[Rollout]:
    rollouts = []
    for micro_batch, row in enumerate(batch.micro_batches):
        for number in range(len(row.rewards)):
            tokens = row.input_ids[row.cu_seqlens[number] : row.cu_seqlens[number + 1]]
            rollouts.append(
                Rollout(
                    batch.meta.group_ids[int(row.group_index[number])],
                    int(row.rollout_index[number]),
                    int(row.policy_versions[number]),
                    int(row.staleness[number]),
                    int(row.times_sampled[number]),
                    checksum(tokens.tolist()),
                    micro_batch,
                    _has_references(row, slice(row.cu_seqlens[number], row.cu_seqlens[number + 1])),
                )
            )
    return rollouts


def _has_references(row: MicroBatch, part: slice) -> bool | None:
    if row.ref_logprobs is None:
        return None
    generated = row.loss_mask[part]
    tokens, values = row.input_ids[part][generated].tolist(), row.ref_logprobs[part][generated].tolist()
    return bool(tokens) and values == [reference_of(token) for token in tokens]


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--history", required=True, type=Path)
    parser.add_argument("--place", required=True, type=Path)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--keep", required=True, type=int)
    parser.add_argument("--adapters", type=int, default=0)
    options = parser.parse_args()
    recorder = Recorder(options.history, options.name)
    rng = random.Random(f"{options.seed} {options.name} {os.getpid()}")
    actor = TrainerActor(
        options.url, options.run, options.place, recorder, rng, options.keep, adapters_of(options.run, options.adapters)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: actor.stop())
    code = actor.train()
    recorder.close()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
