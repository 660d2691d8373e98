"""The sidecar, killed at one phase of one step, such as "written:2"."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from replaybuf.client import Client, TrainerSession
from replaybuf_prime_rl.command import main
from replaybuf_prime_rl.folders import Folders

PHASES = ("attached", "fetched", "half_written", "written", "acked", "published", "removed", "recorded")


def die_after(owner: Any, call: str, phase: str, at: tuple[str, int], steps_off: int = 0) -> None:
    """Die after a method whose first argument is a step, or a number of steps."""
    original = getattr(owner, call)

    def watched(self: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, number, *args, **kwargs)
        if phase == at[0] and number + steps_off >= at[1]:  # it may learn of two steps at once
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, call, watched)


def watch(at: tuple[str, int]) -> None:
    """Die at `at`."""
    die_after(TrainerSession, "attach", "attached", at)
    die_after(Client, "fetch_batch", "fetched", at)
    die_after(Client, "ack", "acked", at)
    die_after(Client, "publish_policy", "published", at, -1)
    die_after(Client, "checkpoint", "recorded", at, -1)
    die_after(Folders, "write", "written", at)
    die_after(Folders, "remove_before", "removed", at, -1)
    original_rename = Path.rename

    def rename(self: Path, target: Path) -> Path:
        renamed = original_rename(self, target)
        if at[0] == "half_written" and str(target).endswith(f"step_{at[1] + 1}/rank_0.bin"):
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed

    Path.rename = rename  # type: ignore[assignment, method-assign]


def start(kill_at: str, arguments: list[str], log: Path) -> None:
    """Run the command in this process, with its log in a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    phase, _, step = kill_at.partition(":")
    watch((phase, int(step)))
    main(arguments)
