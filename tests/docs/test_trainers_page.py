"""The pages on trainers: every example trains a run or sends its feedback."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaybuf.client.client import Client
from replaybuf_trainer.weight_download.local_weights import LocalWeights
from tests.conftest import RunClient, ServeProcess, group
from tests.forked import fork_program

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "trainers.md").read_text() + (DOCS / "publish-weights.md").read_text()
STEPS = 2
TIMEOUT_S = 120.0


def example(heading: str) -> str:
    """Cut the only Python block out of a section."""
    section = re.split(r"\n##+ ", PAGE.partition(f"# {heading}\n")[2])[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return str(block)


def run_example(heading: str, **names: Any) -> dict[str, Any]:
    """Run the block of a section unchanged; return its names."""
    exec(compile(example(heading), f"docs, {heading}", "exec"), names)
    return names


@pytest.fixture
def main(
    own_service: ServeProcess, connect: Callable[[str, str], RunClient], monkeypatch: pytest.MonkeyPatch
) -> RunClient:
    """Create a run `main` of two steps with all its groups, configured as the first example does."""
    monkeypatch.setenv("REPLAYBUF_URL", own_service.url)
    run = connect(own_service.url, "main")
    run.put(batch={"groups_per_batch": 1}, max_steps=STEPS)
    run.append(*(group(f"g{step}") for step in range(STEPS)))
    return run


def test_the_torch_example_trains_the_run_to_its_end(main: RunClient, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    run_example("torch")
    state = main.state()
    assert (state["state"], state["step"], state["published_version"]) == ("finished", STEPS, STEPS)
    assert state["checkpoints"][-1] == STEPS, "without a checkpoint no group is ever freed"
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1"]


def test_a_helper_downloads_what_the_page_uploads_to_an_object_store(tmp_path: Path) -> None:
    folder = tmp_path / "version"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    heading = "Engines without a shared folder"
    uploaded = run_example(heading, folder=folder, version=7, bucket="memory://weights/run")
    with contextlib.closing(LocalWeights(tmp_path / "local", 2)) as local:
        copy = local.fetch(uploaded["weights_uri"], threading.Event())
    assert copy.name.startswith("v000007-")
    assert (copy / "model.safetensors").read_bytes() == bytes(range(256))


def test_the_publisher_of_the_page_writes_and_announces_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from replaybuf_trainer.publishers.publisher import PublisherSetup
    from tests.trainer.publishers.test_weights_folders import Empty

    bucket = run_example("Publish weights")["Bucket"]
    made = bucket(PublisherSetup(weights_dir=tmp_path), bucket.Options(mount=str(tmp_path)))
    made.prepare(3, Empty())
    assert made.commit(3, lambda: None) == "s3://bucket/3" and (tmp_path / "3").is_dir()


def test_a_data_set_of_batches_trains_the_run_to_its_end(main: RunClient) -> None:
    """`DataLoader` takes `BatchDataset` with the arguments of the page."""
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from replaybuf_trainer.reading import BatchDataset, TensorReader

    with Client(str(main.http.base_url), "main") as client:
        attached = client.attach()
        with TensorReader(client, attached.epoch, attached.step) as reader:
            for batch in DataLoader(BatchDataset(reader), batch_size=None, num_workers=0):
                reader.ack()
                client.publish_policy(batch.meta.step + 1, attached.epoch)
    assert main.state()["state"] == "finished"


def test_the_example_of_several_ranks_trains_on_each_of_them(main: RunClient, tmp_path: Path) -> None:
    """Two processes, started as torchrun does, get their part of every step and end with the run."""
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [fork_program(example("Several ranks"), tmp_path, RANK=str(rank), **torchrun) for rank in range(2)]
    try:
        printed = [rank.communicate(TIMEOUT_S)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == [[f"{step} {rank} 1" for step in range(STEPS)] for rank in range(2)]
    assert [rank.returncode for rank in ranks] == [0, 0] and main.state()["state"] == "finished"
    assert main.state()["checkpoints"][-1] == STEPS


def test_the_example_of_values_per_group_sends_priorities(main: RunClient) -> None:
    """The feedback has a priority for every group of the batch."""
    with Client(str(main.http.base_url), "main") as client, client.trainer() as session:
        names = run_example("Values per rollout and group", session=session, batch=next(session))
    assert names["feedback"] == {"priorities": {"g0": pytest.approx(1.0, abs=0.01)}}
