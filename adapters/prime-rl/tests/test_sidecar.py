"""The sidecar feeds prime-rl's data loader: values, restarts of either side, and kill -9 in every phase."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from killed_sidecar import PHASES, start

from replaybuf.client import Client, group_builder
from replaybuf.errors import NotFound
from replaybuf.wire.group import Group
from replaybuf_prime_rl.command import main
from tests.conftest import RunClient, ServeProcess

RANKS, GROUPS, STEPS = 2, 2, 5
CONFIG: dict[str, Any] = {"batch": {"groups_per_batch": GROUPS, "seq_len": 16}, "max_steps": STEPS}
TIMEOUT_S = 90.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["killed_sidecar"])
Rows = list[tuple[int, ...]]


def group_of(ticket: Any, version: int) -> Group:
    """Build the group of a ticket, whose tokens name its prompt."""
    index = ticket.prompt_index
    builder = group_builder([7, 8], prompt_id=f"p/{index}", policy_version=version, ticket=ticket, temperature=0.5)
    builder.add([100 + index, 5], [-0.25, -0.5], 1.0)
    builder.add([100 + index, 6, 9], [-0.25, 0.0, -1.0], 0.0, mask=[1, 0, 1])
    return builder.build()


class Producer(threading.Thread):
    """Appends a group for every ticket until it is stopped."""

    def __init__(self, url: str, run: str) -> None:
        super().__init__(daemon=True)
        self._url, self._run_name, self._stopped = url, run, threading.Event()

    def run(self) -> None:
        with Client(self._url, self._run_name, retry_for_s=30.0) as client:
            while not self._stopped.is_set():
                tickets = client.take_tickets("test", 4, wait_ms=200)
                results = client.append([group_of(ticket, tickets.published_version) for ticket in tickets.tickets])
                for ticket, result in zip(tickets.tickets, results, strict=True):
                    if result.status == "rejected":  # of a version that a rewind took back
                        with contextlib.suppress(NotFound):
                            client.return_ticket(ticket.ticket, "lost_lineage")

    def stop(self) -> None:
        self._stopped.set()
        self.join(TIMEOUT_S)


@pytest.fixture
def fed(run: RunClient, service: ServeProcess) -> Iterator[RunClient]:
    """Create a run with a producer."""
    assert run.put(**CONFIG).status_code == 201
    producer = Producer(service.url, run.run)
    producer.start()
    yield run
    producer.stop()


class SidecarProcess:
    """A sidecar that is started again when it was killed."""

    def __init__(self, run: RunClient, output_dir: Path, kill_at: str = "none:0", *options: str) -> None:
        url = str(run.http.base_url)
        arguments = ["--url", url, "--run", run.run, "--output-dir", str(output_dir), "--poll-s", "0.02"]
        self._arguments = [*arguments, "--dp-world-size", str(RANKS), *options]
        self._log = output_dir.parent / "sidecar.log"
        self.deaths = 0
        self.start(kill_at)

    def start(self, kill_at: str = "none:0") -> None:
        self.process = FORKS.Process(target=start, args=(kill_at, self._arguments, self._log))
        self.process.start()

    def keep_up(self) -> None:
        """Start it again if it was killed. Fails if it ended with an error."""
        code = self.process.exitcode
        assert code in (None, 0, -9), self._log.read_text()
        if code == -9:
            self.deaths += 1
            self.start()

    def wait(self) -> None:
        """Wait until it ends with the run."""
        eventually(lambda: self.process.exitcode == 0, self.keep_up)

    def end(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)


def eventually(condition: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    """Wait for a condition of another process, which tells nobody."""
    ends_s = time.monotonic() + TIMEOUT_S
    while not condition():
        meanwhile()
        assert time.monotonic() < ends_s
        time.sleep(0.01)


class Trainer:
    """prime-rl's trainer without a GPU: its loader, folders and order. `model`: tokens that trained it, by step."""

    def __init__(self, prime_data: Any, output_dir: Path, steps_done: int = 0, model: list[Rows] | None = None) -> None:
        self._output_dir, self._done, self.model = output_dir, steps_done, list(model or [])
        self._loaders = []
        for rank in range(RANKS):
            world = SimpleNamespace(world_size=RANKS, rank=rank)
            prime_data.get_world = lambda world=world: world
            transport = SimpleNamespace(type="filesystem")
            self._loaders.append(prime_data.DataLoader(output_dir, steps_done + 1, RANKS, transport))
        self._broadcast()

    def batch(self, meanwhile: Callable[[], None]) -> list[list[Any]]:
        """Wait for the next batch; return the micro-batches of each rank, as prime-rl's tensors."""
        for loader in self._loaders:
            eventually(loader.receiver.can_receive, meanwhile)
            loader.wait_for_batch()
        return [loader.get_batch() for loader in self._loaders]

    def train(self, meanwhile: Callable[[], None], steps: int = 1) -> None:
        for _ in range(steps):
            ranks = self.batch(meanwhile)
            assert len({len(rank) for rank in ranks}) == 1  # FSDP needs as many on every rank
            self.model.append(sorted(row for rank in ranks for micro in rank for row in sequences(micro)))
            self._done += 1
            self._broadcast()

    def checkpoint(self) -> tuple[int, list[Rows]]:
        """Write a checkpoint; return what a trainer that resumes from it is made with."""
        folder = self._output_dir / "checkpoints" / f"step_{self._done}" / "trainer"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
        return self._done, list(self.model)

    def _broadcast(self) -> None:
        folder = self._output_dir / "broadcasts" / f"step_{self._done}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "STABLE").touch()


def sequences(micro: Any) -> Rows:
    """Return the tokens of each sequence of a micro-batch that has a loss."""
    rows, start = [], 0
    for length in micro["sequence_lengths"]:
        if micro["loss_mask"][0, start : start + length].any():
            rows.append(tuple(micro["input_ids"][0, start : start + length].tolist()))
        start += length
    return rows


def recorded(run: RunClient, steps: int = STEPS) -> list[Rows]:
    """Return the tokens of each step of the surviving history, as the ledger and the stored groups have them."""
    found: list[Rows] = []
    for step in range(steps):
        groups = [group["prompt_index"] for group in run.get(f"batches/{step}/record").json()["groups"]]
        found.append(sorted(row for index in groups for row in ((7, 8, 100 + index, 5), (7, 8, 100 + index, 6, 9))))
    return found


def test_prime_rls_loader_gets_the_values_of_the_groups(fed: RunClient, prime_data: Any, tmp_path: Path) -> None:
    sidecar = SidecarProcess(fed, tmp_path)
    try:
        ranks = Trainer(prime_data, tmp_path).batch(sidecar.keep_up)
    finally:
        sidecar.end()
    seen = []
    for micro in (micro for rank in ranks for micro in rank):
        start = 0
        for length in micro["sequence_lengths"]:
            part = slice(start, start + length)
            start += length
            tokens, mask = micro["input_ids"][0, part].tolist(), micro["loss_mask"][0, part].tolist()
            if not any(mask):
                continue
            answers = tokens[3] == 5
            seen.append(tuple(tokens))
            assert mask == [False, False, True, *([True] if answers else [False, True])]
            logprobs = [-0.25, -0.5] if answers else [-0.25, 0.0, -1.0]
            assert micro["inference_logprobs"][0, part].tolist() == [0.0, 0.0, *logprobs]
            assert micro["position_ids"][0, part].tolist() == list(range(length))
            assert micro["temperatures"][0, part].tolist() == [0.5] * length
            advantage = 1.0 if answers else -1.0
            expected = [advantage if sampled else 0.0 for sampled in mask]
            assert micro["advantages"][0, part].tolist() == pytest.approx(expected, abs=1e-4)
        assert micro["seq_lens"].tolist() == micro["sequence_lengths"] and start == micro["input_ids"].shape[1] >= 2
        assert micro["env_names"] == [fed.run] * start and micro["rl_weights"] is None
    assert sorted(seen) == recorded(fed, 1)[0]


def test_a_training_acks_publishes_and_records_its_steps(fed: RunClient, prime_data: Any, tmp_path: Path) -> None:
    """The process ends with the run. Files of trained steps are gone."""
    sidecar = SidecarProcess(fed, tmp_path)
    try:
        trainer = Trainer(prime_data, tmp_path)
        trainer.train(sidecar.keep_up, 2)
        trainer.checkpoint()
        trainer.train(sidecar.keep_up, STEPS - 2)
        sidecar.wait()
    finally:
        sidecar.end()
    assert trainer.model == recorded(fed)
    state = fed.state()
    assert (state["step"], state["published_version"], state["checkpoints"]) == (STEPS, STEPS, [2])
    assert not list((tmp_path / "rollouts").iterdir())


@pytest.mark.parametrize("phase", PHASES)
def test_a_sidecar_killed_in_any_phase_changes_nothing(
    fed: RunClient, prime_data: Any, tmp_path: Path, phase: str
) -> None:
    """Each step is trained once, as the history says; no group is in two of them."""
    sidecar = SidecarProcess(fed, tmp_path, f"{phase}:{0 if phase == 'attached' else 2}")
    try:
        trainer = Trainer(prime_data, tmp_path)
        trainer.train(sidecar.keep_up, 3)
        trainer.checkpoint()
        trainer.train(sidecar.keep_up, STEPS - 3)
        sidecar.wait()
    finally:
        sidecar.end()
    assert sidecar.deaths == 1 and trainer.model == recorded(fed)
    rows = [row for rows in trainer.model for row in rows]
    assert len(rows) == len(set(rows)) == STEPS * GROUPS * 2
    assert fed.state()["checkpoints"] == [3]


@pytest.mark.parametrize("phase", ["none", "attached", "written", "acked"])
def test_a_trainer_that_resumes_gets_the_same_steps_again(
    fed: RunClient, prime_data: Any, tmp_path: Path, phase: str
) -> None:
    """Its first broadcast is of an older policy than the newest one; the sidecar may be killed then too."""
    sidecar = SidecarProcess(fed, tmp_path, f"{phase}:2")
    try:
        first = Trainer(prime_data, tmp_path)
        first.train(sidecar.keep_up, 2)
        resumed = first.checkpoint()
        first.train(sidecar.keep_up, 2)
        # A restart takes longer than the sidecar needs to notice a broadcast and to remove the files before it.
        eventually(lambda: not (tmp_path / "rollouts" / "step_4").exists(), sidecar.keep_up)
        second = Trainer(prime_data, tmp_path, *resumed)
        second.train(sidecar.keep_up, STEPS - 2)
        sidecar.wait()
    finally:
        sidecar.end()
    assert second.model == recorded(fed) and first.model == second.model[:4]
    assert fed.state()["generation"] == 1


def test_a_trainer_that_did_steps_of_another_run_is_named(fed: RunClient, prime_data: Any, tmp_path: Path) -> None:
    Trainer(prime_data, tmp_path, 7)
    with pytest.raises(SystemExit, match=r"has 7 steps done; needed: steps that the run run-.* delivered"):
        main(["--url", str(fed.http.base_url), "--run", fed.run, "--output-dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"steps_per_publish": 2}, "steps_per_publish of the run is 2; needed: 1"),
        ({"adapters": {"a": {"groups_per_batch": 2}}, "batch": {}}, r"adapters of the run is \['a'\]; needed: \[\]"),
    ],
)
def test_a_run_that_does_not_fit_is_named(run: RunClient, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    assert run.put(**CONFIG | config).status_code == 201
    with pytest.raises(SystemExit, match=message):
        main(["--url", str(run.http.base_url), "--run", run.run, "--output-dir", str(tmp_path)])


def test_an_option_outside_its_bound_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--run", "r", "--output-dir", "o", "--dp-world-size", "0"])
    assert "argument --dp-world-size: 0; the minimum is 1" in capsys.readouterr().err


def test_engines_load_a_policy_before_it_is_published(run: RunClient, prime_data: Any, tmp_path: Path) -> None:
    """On the small engine, which has vLLM's calls."""
    from tests.trainer.served import served, write_model

    assert run.put(**CONFIG | {"max_steps": 1}).status_code == 201
    producer = Producer(str(run.http.base_url), run.run)
    producer.start()
    output = tmp_path / "out"
    for step in range(2):
        write_model(output / "broadcasts" / f"step_{step}", step)
    with served(output / "broadcasts" / "step_0") as engine:
        sidecar = SidecarProcess(run, output, "none:0", "--engine", engine.url)
        try:
            Trainer(prime_data, output).train(sidecar.keep_up)
            sidecar.wait()
            version = engine.version()
        finally:
            sidecar.end()
            producer.stop()
    assert version == "1"
    policy = run.get("policy").json()
    assert (policy["version"], policy["weights_uri"]) == (1, (output / "broadcasts" / "step_1").as_uri())


def test_an_engine_that_is_away_ends_the_sidecar_with_its_address(
    fed: RunClient, prime_data: Any, tmp_path: Path
) -> None:
    """A supervisor starts it again; the version is not published."""
    Trainer(prime_data, tmp_path)
    with pytest.raises(SystemExit, match=r"POST http://127.0.0.1:9/pause"):
        main(
            [
                "--url",
                str(fed.http.base_url),
                "--run",
                fed.run,
                "--output-dir",
                str(tmp_path),
                "--engine",
                "http://127.0.0.1:9",
            ]
        )
