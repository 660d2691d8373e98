"""Back up, delete and restore a run of its own, then train it to its end: `python -m tests.chaos.side_run`.

Servers and Redis are hurt meanwhile, so each call is repeated until it is answered. A server that was stopped while it
deletes the run may go on when the run is restored.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

from replaybuf.client.client import Client
from replaybuf.errors import Gone, NotFound
from replaybuf.wire.contract import WaitingAnswer
from tests.chaos.calling import answered, load_options
from tests.chaos.content import checksum, make_group, tokens_of
from tests.chaos.history import Recorder, Restored, now_s
from tests.chaos.processes import python
from tests.chaos.runs import spill_to
from tests.chaos.trainer import read_body
from tests.waiting import eventually

GROUPS, PER_BATCH, STEPS_BEFORE = 24, 6, 1
TIMEOUT_S, COMMAND_TIMEOUT_S = 3.0, 60.0
WORK_S = 240.0


class SideRun:
    """One run from its creation to its second deletion. `differences`: what a restore changed."""

    def __init__(self, url: str, name: str, redis_url: str, folder: Path) -> None:
        self._name, self._redis_url, self._folder = name, redis_url, folder
        self._client = Client(url, name, timeout_s=TIMEOUT_S)
        self._commands = 0
        self.differences: list[str] = []

    def work(self) -> None:
        """Do all of it."""
        client, names = self._client, [f"{self._name}-{number}" for number in range(GROUPS)]
        batch = {"groups_per_batch": PER_BATCH, "tokens_per_batch": None, "seq_len": 64}
        strategy = {"name": "one-step-off-policy", "options": {"max_staleness": GROUPS}}
        config: dict[str, Any] = {"batch": batch, "strategy": strategy, **spill_to(self._folder / "spill")}
        answered(WORK_S, lambda: client.put_run(config))
        for name in names:
            group = make_group(name, 0, named=True)
            answered(WORK_S, lambda group=group: client.append([group]))  # type: ignore[misc]
        self._train(range(STEPS_BEFORE))
        before = self._facts()
        file = self._command("backup", self._name, "--to")
        self._delete()
        self._command("restore", "--from", file=file)
        self._compare("its state and rollouts", before, self._facts())
        rest = self._train(range(STEPS_BEFORE, GROUPS // PER_BATCH))
        used = STEPS_BEFORE * PER_BATCH
        self._compare("the groups trained afterwards", sorted(names[used:]), sorted(rest))
        self._compare("groups that became unreadable", 0, answered(WORK_S, client.get_run).groups.dead_lettered)
        self._delete()
        client.close()

    def _compare(self, what: str, before: object, after: object) -> None:
        if before != after:
            self.differences.append(f"{what}: {before} became {after}")

    def _facts(self) -> dict[str, object]:
        """Return the counts of the run, and the checksum of each rollout that is still needed."""
        client = self._client
        # A follower may be behind the checkpoint, which is the last record of the training.
        state = eventually(
            lambda: answered(WORK_S, client.get_run), WORK_S, lambda seen: STEPS_BEFORE in seen.checkpoints
        )
        listed = answered(WORK_S, lambda: client.list_groups("live", GROUPS)).groups
        rollouts = {}
        for name in sorted(group.group_id for group in listed):
            group = answered(WORK_S, lambda name=name: client.get_group(name))  # type: ignore[misc]
            rollouts[name] = [checksum(rollout.prompt_ids + rollout.completion_ids) for rollout in group.rollouts or []]
        return {
            "step": state.step,
            "version": state.published_version,
            "stored": state.groups.stored,
            "live": state.groups.live,
            "dead_lettered": state.groups.dead_lettered,
            "rollouts": rollouts,
        }

    def _train(self, steps: range) -> list[str]:
        """Train steps and record a checkpoint; return the ids of the groups whose tokens were right."""
        client, trained = self._client, list[str]()
        epoch = answered(WORK_S, lambda: client.attach(1)).epoch
        for step in steps:
            for rollout in read_body(self._fetch(step, epoch)).rollouts:
                name = rollout.group_id
                if rollout.tokens == checksum(tokens_of(name, "", rollout.rollout)) and name not in trained:
                    trained.append(name)
            answered(WORK_S, lambda step=step: client.ack(step, epoch))  # type: ignore[misc]
            answered(WORK_S, lambda step=step: client.publish_policy(step + 1, epoch))  # type: ignore[misc]
        answered(WORK_S, lambda: client.checkpoint(steps.stop, epoch, 1))
        return trained

    def _fetch(self, step: int, epoch: int) -> bytes:
        def body() -> bytes | None:
            answer = answered(WORK_S, lambda: self._client.fetch_batch(step, epoch, 0, wait_ms=500))
            return None if isinstance(answer, WaitingAnswer) else answer

        return eventually(body, WORK_S)  # type: ignore[return-value]

    def _delete(self) -> None:
        """Finish and delete the run; an attempt without an answer may have done so."""
        client = self._client

        def delete() -> None:
            with contextlib.suppress(Gone, NotFound):
                client.patch_run({"state": "finished"})
                client.delete_run()

        answered(WORK_S, delete)

    def _command(self, *words: str, file: Path | None = None) -> Path:
        """Run a command of `replaybuf` until it succeeds, on `file`, or on a new one each time; return the file."""

        def succeeds() -> Path | None:
            self._commands += 1
            path = file or self._folder / f"{self._name}-{self._commands}.backup"
            command = python("replaybuf", *words, str(path), "--redis-url", self._redis_url)
            try:
                ended = subprocess.run(command, timeout=COMMAND_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired:
                return None
            return None if ended.returncode else path

        return eventually(succeeds, WORK_S)  # type: ignore[return-value]


def main() -> None:
    """Read the command line and work."""
    options = load_options()
    recorder = Recorder(options.history, options.name)
    side = SideRun(options.url, options.name, options.redis_url, options.folder)
    side.work()
    recorder.write(Restored(at_s=now_s(), run=options.run, side=options.name, differences=side.differences))
    recorder.close()


if __name__ == "__main__":
    main()
