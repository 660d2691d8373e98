"""docs/grpo.md: its program trains a model on a run, and resumes from its newest folder of weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replaybuf.client import Client, group_builder
from tests.conftest import ServeProcess
from tests.forked import ForkedProcess, fork_program

torch = pytest.importorskip("torch")

PAGE = (Path(__file__).parents[2] / "docs" / "grpo.md").read_text()
PROMPT, REWARDED, OTHER = [5, 6], [7, 8, 9], [10, 11, 12]
STEPS = 3
TIMEOUT_S = 150.0


def start(url: str, folder: Path) -> ForkedProcess:
    """Start the program of the page in `folder`."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return fork_program(program, folder, REPLAYBUF_URL=url, MODEL=str(folder / "model"), HF_HUB_OFFLINE="1")


def preference(folder: Path) -> float:
    """Return by how much the model prefers the rewarded completion, in nats."""
    from replaybuf_trainer.models.loading import load_model
    from tests.trainer.served import oracle

    model = load_model(folder)
    return sum(oracle(model, PROMPT, REWARDED)) - sum(oracle(model, PROMPT, OTHER))


def test_the_program_learns_resumes_and_sends_its_loss(own_service: ServeProcess, tmp_path: Path) -> None:
    """The rewarded completion becomes more probable; the second start continues at the step of the first."""
    from replaybuf_trainer.models.loading import load_model
    from tests.trainer.served import oracle, write_model

    model = load_model(write_model(tmp_path / "model", 0))

    def fill(client: Client, step: int) -> None:
        for number in (2 * step, 2 * step + 1):
            group = group_builder(PROMPT, prompt_id=f"p{number}", policy_version=0, group_id=f"g{number}")
            for completion, reward in ((REWARDED, 1.0), (OTHER, 0.0)):
                group.add(completion, oracle(model, PROMPT, completion), reward)
            client.append([group.build()])

    with Client(own_service.url, "main") as client:
        strategy = {"name": "one-step-off-policy", "options": {"max_staleness": STEPS}}
        client.put_run({"batch": {"groups_per_batch": 2}, "max_steps": STEPS, "strategy": strategy})
        fill(client, 0)
        first = start(own_service.url, tmp_path)
        assert first.stdout is not None
        assert first.stdout.readline().startswith("step 0: loss")
        first.kill()
        first.communicate(TIMEOUT_S)
        for step in range(1, STEPS):
            fill(client, step)
        second = start(own_service.url, tmp_path)
        output, errors = second.communicate(TIMEOUT_S)
        assert second.returncode == 0, errors
        assert [line.partition(":")[0] for line in output.splitlines()] == ["step 1", "step 2"]
        assert client.get_run().checkpoints[-1] == STEPS
    before, *after = map(preference, (tmp_path / "model", *(tmp_path / "weights" / str(n + 1) for n in range(STEPS))))
    assert [before, *after] == sorted([before, *after])
