"""The example trains and resumes as it is, where `python3 train.py` is slime's parser and loop on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

from replaybuf.client import group_builder
from replaybuf.wire.contract import Ticket
from replaybuf.wire.group import Group
from tests.conftest import RunClient
from tests.example_scripts import ROOT, run_script
from tests.ticket_producer import producing

EXAMPLE = ROOT / "examples" / "slime"
STEPS = 4


def group_of(ticket: Ticket, version: int) -> Group:
    """Build a group of the example's size, whose tokens name its prompt."""
    builder = group_builder([7], prompt_id=f"p/{ticket.prompt_index}", policy_version=version, ticket=ticket)
    for rollout in range(8):
        builder.add([1000 + ticket.prompt_index, rollout], [-0.5, -0.5], float(rollout % 2))
    return builder.build()


def start(run: RunClient, source: Path, folder: Path, kill_at: str) -> tuple[int, str]:
    """Run the script; return its exit code, and the options that slime leaves to Megatron and SGLang."""
    return run_script(
        EXAMPLE / "train.sh",
        *("--num-rollout", str(STEPS), "--save-interval", "2"),
        run=run,
        folder=folder,
        stand_in=Path(__file__).with_name("python3.py"),
        cwd=source,
        KILL_AT=kill_at,
    )


def test_the_script_resumes_a_training_that_was_killed(run: RunClient, source: Path, tmp_path: Path) -> None:
    assert run.put(**json.loads((EXAMPLE / "run.json").read_text())).status_code == 201
    with producing(str(run.http.base_url), run.run, group_of):
        assert start(run, source, tmp_path, "fetched:3")[0] != 0
        assert run.state()["checkpoints"] == [2]
        code, options = start(run, source, tmp_path, "none:0")
    assert code == 0
    assert run.state()["step"] == STEPS and run.state()["checkpoints"] == [STEPS]
    model = json.loads((tmp_path / "out" / f"{STEPS - 1}.model").read_text())
    for step, rows in enumerate(model):
        groups = run.get(f"batches/{step}/record").json()["groups"]
        expected = sorted([7, 1000 + group["prompt_index"], rollout] for group in groups for rollout in range(8))
        assert rows == expected
    scripts = source / "scripts"
    texts = [(scripts / name).read_text() for name in ("run-qwen3-4B.sh", "models/qwen3-4B.sh")]
    left_to_megatron = {word for word in options.split() if word.startswith("--")}
    assert "--optimizer" in left_to_megatron and left_to_megatron <= set(re.findall(r"--[a-z0-9-]+", " ".join(texts)))
