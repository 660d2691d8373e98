"""A trainer without a model, for the tests of `replaybuf up`: it appends the groups of its batches itself.

`python standin_trainer.py STATE FAULT` keeps its step in the file STATE and prints a line per step. FAULT is a file:
while it exists, the trainer waits before each step but the first (`hold`), or exits with code 7 (`die`).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

GROUPS, ROLLOUTS = 2, 2


def main(state: Path, fault: Path) -> None:
    """Train from the step in the file until the run is finished."""
    first = int(state.read_text()) if state.exists() else 0
    url, run = os.environ["REPLAYBUF_URL"], os.environ["REPLAYBUF_RUN"]
    with httpx.Client(base_url=f"{url}/v1/runs/{run}/", timeout=30) as http:
        epoch = post(http, "attach", {"resume_step": first})["epoch"]
        step = first
        while obey(step, fault) and train(http, step, epoch):
            step += 1
            print(f"step {step}", flush=True)
            post(http, "checkpoints", {"epoch": epoch, "step": step})
            state.write_text(str(step))


def obey(step: int, fault: Path) -> bool:
    """Wait or fail, as the file says; return True to go on."""
    while step and fault.exists():
        if fault.read_text() == "die":
            print("weights are not finite", flush=True)
            raise SystemExit(7)
        time.sleep(0.02)
    return True


def train(http: httpx.Client, step: int, epoch: int) -> bool:
    """Do one step; return False at the end of the run."""
    post(http, "groups", {"groups": [group(f"{step}-{number}", step) for number in range(GROUPS)]})
    while (answer := http.get(f"batches/{step}", params={"epoch": epoch, "wait_ms": 1000})).status_code == 202:
        pass
    if answer.status_code == 410:
        return False
    answer.raise_for_status()
    post(http, f"batches/{step}/ack", {"epoch": epoch})
    post(http, "policy", {"epoch": epoch, "version": step + 1})
    return True


def group(name: str, version: int) -> dict[str, Any]:
    """Make up a group, two tokens a rollout."""
    rollout = {"prompt_ids": [0], "completion_ids": [1], "inference_logprobs": [-0.1]}
    rollouts = [rollout | {"reward": number % 2} for number in range(ROLLOUTS)]
    return {"group_id": name, "prompt_id": name, "policy_version": version, "rollouts": rollouts}


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """POST until the service answers; it may be restarting. A finished run takes no groups, which is no error."""
    deadline = time.monotonic() + 60
    while True:
        try:
            answer = http.post(path, json=body)
            if answer.status_code not in (429, 503):
                return answer.json() if answer.is_success else answer.raise_for_status() if path != "groups" else {}
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
