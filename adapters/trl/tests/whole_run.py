"""A whole run as real processes: Valkey, service, small engine, generator, and the example trained by TRL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training import Groups, with_advantages

from replaybuf.lab.demo.accuracy import HeldOutProblems
from replaybuf.lab.demo.folder import Folder
from tests.conftest import RunClient, ServeProcess
from tests.ports import free_port
from tests.trainer.engine_process import engine_process
from tests.valkeys import Valkey
from tests.waiting import eventually, patience

ROOT = Path(__file__).parents[3]
RUN = "trl"
GROUPS, GROUP_SIZE = 16, 8
ENVIRONMENT_NAME, MAX_TOKENS = "reasoning-gym", 8
TIMEOUT_S = 1500.0
MODULE = [sys.executable, "-m", "replaybuf"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


class WholeRun:
    """The processes of a run below `folder`. `kill` ends one by SIGKILL and starts it again."""

    def __init__(self, folder: Path, model: Path, steps: int, save_steps: int) -> None:
        self.folder = folder
        self.model = model
        self.steps = steps
        self.save_steps = save_steps
        self.trained_file = folder / "trained.jsonl"
        self.kills: Counter[str] = Counter()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> WholeRun:
        with contextlib.ExitStack() as opening:
            self.valkey = opening.enter_context(Valkey(self.folder / "valkey"))
            self.service = ServeProcess(self.folder / "data", "--redis-url", self.valkey.url)
            self.service.port = str(free_port())
            opening.callback(self.service.end)
            self.service.start()
            self.client = RunClient(self.service.url, RUN)
            opening.callback(self.client.http.close)
            self.engine = opening.enter_context(engine_process(self.model)).url
            config = {
                "batch": {"groups_per_batch": GROUPS, "tokens_per_batch": None, "seq_len": 128},
                "group_size": GROUP_SIZE,
                "max_steps": self.steps,
                "tickets": {"ttl_s": 20, "max_attempts": 100},
            }
            assert self.client.put(**config).status_code == 201
            # It keeps the bytes of all groups for the check at the end.
            assert self.client.get("cursors/check", kind="stored").status_code == 200
            self.accuracy_before = self.held_out_accuracy()
            self.generator = self._start("generate", *self._generate())
            self.trainer = self._start_trainer()
            opening.callback(self._end_children)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # ------------------------------------------------------------------ processes

    def _generate(self) -> list[str]:
        options = {
            "--url": self.service.url,
            "--run": RUN,
            "--engine": self.engine,
            "--environment": ENVIRONMENT_NAME,
            "--prompts": str(self.model / "prompts.jsonl"),
            "--tokenizer": str(self.model),
            "--group-size": str(GROUP_SIZE),
            "--max-tokens": str(MAX_TOKENS),
        }
        return [*MODULE, "generate", *(word for pair in options.items() for word in pair)]

    def _start_trainer(self) -> subprocess.Popen[bytes]:
        example = str(ROOT / "examples" / "trl" / "train.py")
        options = {
            "--url": self.service.url,
            "--run": RUN,
            "--model": str(self.model),
            "--engine": self.engine,
            "--output": str(self.folder / "out"),
            "--steps": str(self.steps),
            "--save-steps": str(self.save_steps),
        }
        words = [word for pair in options.items() for word in pair]
        return self._start(
            "train", sys.executable, str(Path(__file__).with_name("recording.py")), example, *words, "--cpu"
        )

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = ENVIRONMENT | {"TRAINED": str(self.trained_file)}
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _end_children(self) -> None:
        for process in (self.generator, self.trainer):
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        """The end of the log of `train` or `generate`."""
        return (self.folder / f"{name}.log").read_text()[-4000:]

    # ------------------------------------------------------------------ accuracy

    def held_out_accuracy(self) -> dict[str, float]:
        """Share of correct answers of the engine by held-out problem, sampled at temperature 1."""
        root = self.folder / "held-out"
        root.mkdir(exist_ok=True)
        (root / "model").unlink(missing_ok=True)
        (root / "model").symlink_to(self.model.resolve())
        problems = HeldOutProblems(Folder(root), ENVIRONMENT_NAME, MAX_TOKENS)
        evaluation, _ = asyncio.run(problems.evaluate(self.engine, 0, greedy=False))
        return evaluation.sampled_by_problem

    # ------------------------------------------------------------------ kills

    def kill(self, what: str) -> None:
        """Kill a part and start it again."""
        self.kills[what] += 1
        if what == "trainer":
            self.trainer.send_signal(signal.SIGKILL)
            self.trainer.wait()
            self.trainer = self._start_trainer()
        elif what == "service":
            self.service.kill()
            self.service.start()
        else:
            self.valkey.kill()
            self.valkey.start()

    def kill_at_random(self, kills: int, rng: random.Random) -> None:
        """Kill parts, each after some more micro-batches of TRL, until so many kills or the end of the run."""
        kinds = ["trainer", "service", "valkey"]
        order = rng.sample(kinds, 3) + [rng.choice(kinds) for _ in range(kills)]
        for what in order[:kills]:
            seen = self._trained() + rng.randrange(1, 12)
            eventually(lambda seen=seen: self._trained() >= seen or self._ended(), TIMEOUT_S)  # type: ignore[misc]
            if self._ended():
                return
            time.sleep(rng.uniform(0, 0.5))  # a moment within a step
            self.kill(what)

    def _trained(self) -> int:
        return self.trained_file.read_bytes().count(b'"trained"') if self.trained_file.exists() else 0

    def _ended(self) -> bool:
        return self.trainer.poll() is not None

    def finish(self) -> None:
        """Wait for the end of the training."""
        code = self.trainer.wait(TIMEOUT_S * patience())
        assert code == 0, self.log("train")

    # ------------------------------------------------------------------ what happened

    def lines(self) -> list[dict[str, Any]]:
        """What `recording` wrote."""
        if not self.trained_file.exists():
            return []
        return [json.loads(line) for line in self.trained_file.read_text().splitlines(True) if line.endswith("\n")]

    def micro_batches(self) -> list[dict[str, Any]]:
        """The micro-batches that TRL trained, also those of killed attempts."""
        return [line for line in self.lines() if "trained" in line]

    def attempts(self) -> dict[int, list[list[list[str]]]]:
        """By step, the attempts in order; an attempt is its micro-batches, whose rollouts are sorted digests."""
        by_step: dict[int, dict[int, list[list[str]]]] = {}
        for line in self.micro_batches():
            by_step.setdefault(line["step"], {}).setdefault(line["pid"], []).append(sorted(line["trained"]))
        return {step: list(of_pid.values()) for step, of_pid in by_step.items()}

    def groups(self) -> Groups:
        """All groups that were stored, with their rollouts."""
        groups: Groups = {}
        while True:
            page = self.client.get("cursors/check", limit=500).json()
            if not page["groups"]:
                return groups
            assert page["gap"] is None
            groups |= {group["group_id"]: group for group in page["groups"]}
            assert self.client.post("cursors/check", position=page["position"]).status_code == 200

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of the surviving history."""
        for step in range(self.steps):
            response = self.client.get(f"batches/{step}/record")
            assert response.status_code == 200, response.text
            yield response.json()


def rollouts_of(record: dict[str, Any], groups: Groups) -> list[dict[str, Any]]:
    """The rollouts of the groups that a record names, with their advantages."""
    return [rollout for used in record["groups"] for rollout in with_advantages(groups[used["group_id"]]["rollouts"])]


def mean_reward(record: dict[str, Any], groups: Groups) -> float:
    """Mean reward of the rollouts of a step."""
    return statistics.fmean(rollout["reward"] for rollout in rollouts_of(record, groups))
