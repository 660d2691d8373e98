"""The example trains and resumes as it is, where `torchrun` starts prime-rl's loader on a CPU."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path
from typing import Any

from prime_source import PACKAGE, SOURCE
from prime_trainer import RANKS

from tests.conftest import RunClient
from tests.example_scripts import ROOT, run_script
from tests.ticket_producer import Rows, producing, recorded_rows

EXAMPLE = ROOT / "examples" / "prime-rl"
CLASSES = {
    "": ("TrainerConfig",),
    "model": ("ModelConfig", "BaseModelConfig"),
    "optim": ("AdamWConfig", "BaseOptimizerConfig"),
    "rollout_transport": ("FileSystemTransportConfig",),
    "weight_broadcast": ("FileSystemWeightBroadcastConfig",),
    "ckpt": ("CheckpointConfig",),
    "resume": ("ResumeConfig",),
}


def start(run: RunClient, folder: Path, kill_after: int) -> int:
    """Run the script; return its exit code. 0 = kill no trainer."""
    stand_in = Path(__file__).with_name("torchrun.py")
    variables = {"GPUS": str(RANKS), "KILL_AFTER": str(kill_after), "PRIME_RL": str(SOURCE.checkout() / PACKAGE)}
    return run_script(EXAMPLE / "train.sh", run=run, folder=folder, stand_in=stand_in, **variables)[0]


def test_the_script_resumes_a_training_that_was_killed(run: RunClient, prime_data: Any, tmp_path: Path) -> None:
    config = json.loads((EXAMPLE / "run.json").read_text())
    assert run.put(**config).status_code == 201  # the script creates it otherwise, but the producer is there first
    steps = config["max_steps"]
    with producing(str(run.http.base_url), run.run):
        assert start(run, tmp_path, 7) != 0
        assert run.state()["state"] == "running"
        assert start(run, tmp_path, 0) == 0
    trained = json.loads((tmp_path / "out" / "model.json").read_text())
    model: list[Rows] = [[tuple(row) for row in rows] for rows in trained]
    assert len(model) == steps and model == recorded_rows(run, steps)
    assert (run.state()["state"], run.state()["generation"]) == ("finished", 1)


def test_the_configuration_has_fields_of_prime_rls(prime_data: Any) -> None:
    """Of its classes' source: its configurations need Python 3.12."""
    fields: dict[str, set[str]] = {}
    for name in ("trainer", "shared"):
        file = SOURCE.checkout() / f"packages/prime-rl-configs/src/prime_rl/configs/{name}.py"
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                fields[node.name] = {name.id for name in names if isinstance(name, ast.Name)}
    config = tomllib.loads((EXAMPLE / "trainer.toml").read_text())
    for section, classes in CLASSES.items():
        known = set().union(*(fields[name] for name in classes))
        assert set(config[section] if section else config) <= known
    assert set(CLASSES) - {""} == {name for name, value in config.items() if isinstance(value, dict)}


def test_the_configuration_fits_the_run() -> None:
    run = json.loads((EXAMPLE / "run.json").read_text())
    config = tomllib.loads((EXAMPLE / "trainer.toml").read_text())
    assert (config["max_steps"], config["model"]["seq_len"]) == (run["max_steps"], run["batch"]["seq_len"])
