"""docs/getting-started.md: the producer and the trainer of the page train a run from nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.conftest import ServeProcess

PAGE = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text()
TIMEOUT_S = 100.0


def test_the_snippets_train_the_policy_on_a_fresh_service(own_service: ServeProcess, tmp_path: Path) -> None:
    """The run is created, the producer and the trainer end with it, and the policy has learnt its token."""
    create, producer, trainer = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    environment = os.environ | {"REPLAYBUF_URL": own_service.url}

    def start(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", code]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    with start(create) as created:
        assert created.wait(TIMEOUT_S) == 0
    with start(producer) as produces, start(trainer) as trains:
        try:
            lines = trains.communicate(timeout=TIMEOUT_S)[0].splitlines()
            stored = produces.communicate(timeout=TIMEOUT_S)[0]
        finally:
            produces.kill()
            trains.kill()
    assert (trains.returncode, produces.returncode) == (0, 0)
    rewards = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(rewards) == 30
    assert rewards[-1] > rewards[0] + 0.2
    assert "p0 stored" in stored
    assert np.load(tmp_path / ".replaybuf" / "toy" / "weights" / "30.npy").argmax() == 7
