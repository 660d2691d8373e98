"""The example of verl: its options are verl's, and the run that it creates fits them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import verl
from hydra import compose, initialize_config_dir

from replaybuf.client import Client
from tests.conftest import RunClient, connect, own_service, run, service, shared_service

__all__ = ["connect", "own_service", "run", "service", "shared_service"]

EXAMPLE = Path(__file__).parents[3] / "examples" / "verl" / "train.sh"
STAND_IN = f"#!{sys.executable}\nimport json, os, sys\njson.dump(sys.argv[1:], open(os.environ['GIVEN'], 'w'))\n"


def test_the_script_makes_a_run_and_options_that_fit(run: RunClient, tmp_path: Path) -> None:
    (tmp_path / "python3").write_text(STAND_IN)
    (tmp_path / "python3").chmod(0o755)
    environment = {
        "REPLAYBUF_URL": str(run.http.base_url),
        "RUN": run.run,
        "GIVEN": str(tmp_path / "given.json"),
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for _ in range(2):  # the second one resumes
        subprocess.run([EXAMPLE], env=os.environ | environment, cwd=tmp_path, check=True, timeout=60)
    module, name, *options = json.loads((tmp_path / "given.json").read_text())
    assert (module, name) == ("-m", "verl.trainer.main_ppo")
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=options)

    from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from replaybuf_transferqueue.sampler import CheckpointReport, ReplaybufSampler
    from replaybuf_transferqueue.sampler_settings import Pace, check_run

    mode = config.trainer.v1.trainer_mode
    trainer = SimpleNamespace(config=config, trainer_mode=mode, _add_prompts_to_generate=None)
    assert type(PPOTrainer._build_replay_buffer(trainer)) is ReplaybufSampler
    assert type(build_checkpoint_callback(config)) is CheckpointReport
    with Client(str(run.http.base_url), run.run) as client:
        status = client.get_run()
    check_run(status, Pace.of(mode, config.trainer.v1[mode]), config.data.train_batch_size)
    assert status.facts().group_size == config.actor_rollout_ref.rollout.n
    assert (status.facts().batch.seq_len or 0) >= config.data.max_prompt_length + config.data.max_response_length
