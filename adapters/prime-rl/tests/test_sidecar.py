"""The sidecar feeds prime-rl's data loader: values, restarts of either side, and kill -9 in every phase."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from killed_sidecar import PHASES, start
from prime_source import PACKAGE, SOURCE
from prime_trainer import RANKS, TIMEOUT_S, PrimeTrainer, eventually

from replaybuf.client import Client
from replaybuf.errors import Fenced
from replaybuf_prime_rl import Sidecar, SidecarOptions
from replaybuf_prime_rl.command import main
from tests.conftest import RunClient, ServeProcess
from tests.ticket_producer import WEIGHTED, producing, recorded_rows
from tests.waiting import patience

GROUPS, STEPS = 2, 5
CONFIG: dict[str, Any] = {"batch": {"groups_per_batch": GROUPS, "seq_len": 16}, "max_steps": STEPS}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["killed_sidecar"])


@pytest.fixture
def fed(run: RunClient, service: ServeProcess) -> Iterator[RunClient]:
    """Create a run with a producer."""
    assert run.put(**CONFIG).status_code == 201
    with producing(service.url, run.run):
        yield run


def options_of(run: RunClient, output_dir: Path) -> list[str]:
    """Return the options that every process needs."""
    package = str(SOURCE.checkout() / PACKAGE)
    at = ["--url", str(run.http.base_url), "--run", run.run]
    return [*at, "--output-dir", str(output_dir), "--prime-rl", package]


class SidecarProcess:
    """A sidecar that is started again when it was killed."""

    def __init__(self, run: RunClient, output_dir: Path, kill_at: str = "none:0", *options: str) -> None:
        arguments = [*options_of(run, output_dir), "--poll-s", "0.02"]
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S * patience())


def test_prime_rls_loader_gets_the_values_of_the_groups(fed: RunClient, prime_data: Any, tmp_path: Path) -> None:
    with SidecarProcess(fed, tmp_path) as sidecar:
        ranks = PrimeTrainer(prime_data, tmp_path).batch(sidecar.keep_up)
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
    assert sorted(seen) == recorded_rows(fed, 1)[0]


def test_a_training_acks_publishes_and_records_its_steps(fed: RunClient, prime_data: Any, tmp_path: Path) -> None:
    """The process ends with the run. Files of trained steps are gone."""
    with SidecarProcess(fed, tmp_path) as sidecar:
        trainer = PrimeTrainer(prime_data, tmp_path)
        trainer.train(sidecar.keep_up, 2)
        trainer.checkpoint()
        trainer.train(sidecar.keep_up, STEPS - 2)
        sidecar.wait()
    assert trainer.model == recorded_rows(fed, STEPS)
    state = fed.state()
    assert (state["step"], state["published_version"], state["checkpoints"]) == (STEPS, STEPS, [2])
    assert not list((tmp_path / "rollouts").iterdir())


def test_a_batch_does_not_wait_for_the_next_look_at_the_folder(run: RunClient, prime_data: Any, tmp_path: Path) -> None:
    """The process looks every five minutes here, and the groups come after it has attached."""
    assert run.put(**CONFIG).status_code == 201
    trainer = PrimeTrainer(prime_data, tmp_path)
    with SidecarProcess(run, tmp_path, "none:0", "--poll-s", "300") as sidecar:
        eventually(lambda: run.state()["epoch"] == 1, sidecar.keep_up)
        with producing(str(run.http.base_url), run.run):
            assert trainer.batch(sidecar.keep_up)


@pytest.mark.parametrize("phase", PHASES)
def test_a_sidecar_killed_in_any_phase_changes_nothing(
    fed: RunClient, prime_data: Any, tmp_path: Path, phase: str
) -> None:
    """Each step is trained once, as the history says; no group is in two of them."""
    with SidecarProcess(fed, tmp_path, f"{phase}:{0 if phase == 'attached' else 2}") as sidecar:
        trainer = PrimeTrainer(prime_data, tmp_path)
        trainer.train(sidecar.keep_up, 3)
        trainer.checkpoint()
        trainer.train(sidecar.keep_up, STEPS - 3)
        sidecar.wait()
    assert sidecar.deaths == 1 and trainer.model == recorded_rows(fed, STEPS)
    rows = [row for rows in trainer.model for row in rows]
    assert len(rows) == len(set(rows)) == STEPS * GROUPS * 2
    assert fed.state()["checkpoints"] == [3]


@pytest.mark.parametrize("phase", ["none", "attached", "written", "acked"])
def test_a_trainer_that_resumes_gets_the_same_steps_again(
    fed: RunClient, prime_data: Any, tmp_path: Path, phase: str
) -> None:
    """Its first broadcast is of an older policy than the newest one; the sidecar may be killed then too."""
    with SidecarProcess(fed, tmp_path, f"{phase}:2") as sidecar:
        first = PrimeTrainer(prime_data, tmp_path)
        first.train(sidecar.keep_up, 2)
        resumed = first.checkpoint()
        first.train(sidecar.keep_up, 2)
        # A restart takes longer than the sidecar needs to notice a broadcast and to remove the files before it.
        eventually(lambda: not (tmp_path / "rollouts" / "step_4").exists(), sidecar.keep_up)
        second = PrimeTrainer(prime_data, tmp_path, *resumed)
        second.train(sidecar.keep_up, STEPS - 2)
        sidecar.wait()
    assert second.model == recorded_rows(fed, STEPS) and first.model == second.model[:4]
    assert fed.state()["generation"] == 1


def test_a_fenced_sidecar_leaves_the_files_of_its_successor(
    fed: RunClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended after it fetched a batch, and writes the files of the same step."""
    marker = tmp_path / "broadcasts" / "step_0" / "STABLE"
    marker.parent.mkdir(parents=True)
    marker.touch()
    written = tmp_path / "rollouts" / "step_1" / "rank_0.bin"
    fetch = Client.fetch_batch

    def fetch_and_lose_the_run(client: Client, *args: Any, **kwargs: Any) -> Any:
        body = fetch(client, *args, **kwargs)
        if isinstance(body, bytes):
            client.attach()
            written.parent.mkdir(parents=True)
            written.write_bytes(b"of the successor")
        return body

    monkeypatch.setattr(Client, "fetch_batch", fetch_and_lose_the_run)
    with Client(str(fed.http.base_url), fed.run) as client, pytest.raises(Fenced):
        Sidecar(client, SidecarOptions(output_dir=tmp_path)).run()
    assert written.read_bytes() == b"of the successor" and list(written.parent.iterdir()) == [written]


def test_a_trainer_that_did_steps_of_another_run_is_named(fed: RunClient, prime_data: Any, tmp_path: Path) -> None:
    PrimeTrainer(prime_data, tmp_path, 7)
    with pytest.raises(SystemExit, match=r"has 7 steps done; needed: steps that the run run-.* delivered"):
        main(options_of(fed, tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"steps_per_publish": 2}, ": steps_per_publish is 2; needed: 1"),
        ({"adapters": {"a": {"groups_per_batch": 2}}, "batch": {}}, r": adapters is \['a'\]; needed: \[\]"),
    ],
)
def test_a_run_that_does_not_fit_is_named(run: RunClient, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    assert run.put(**CONFIG | config).status_code == 201
    with pytest.raises(SystemExit, match=message):
        main(options_of(run, tmp_path))


def test_sampling_weights_are_rejected(run: RunClient, prime_data: Any, tmp_path: Path) -> None:
    assert run.put(**CONFIG | {"strategy": WEIGHTED}).status_code == 201
    PrimeTrainer(prime_data, tmp_path)
    arguments = options_of(run, tmp_path)
    with (
        producing(str(run.http.base_url), run.run),
        pytest.raises(SystemExit, match="weights, which prime-rl cannot apply; set its option importance to 0"),
    ):
        main(arguments)


def test_an_option_outside_its_bound_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--run", "r", "--output-dir", "o", "--dp-world-size", "0"])
    assert "argument --dp-world-size: 0; the minimum is 1" in capsys.readouterr().err


def test_engines_load_a_policy_before_it_is_published(run: RunClient, prime_data: Any, tmp_path: Path) -> None:
    """On the small engine, which has vLLM's calls."""
    from tests.trainer.served import served, write_model

    assert run.put(**CONFIG | {"max_steps": 1}).status_code == 201
    output = tmp_path / "out"
    for step in range(2):
        write_model(output / "broadcasts" / f"step_{step}", step)
    with (
        producing(str(run.http.base_url), run.run),
        served(output / "broadcasts" / "step_0") as engine,
        SidecarProcess(run, output, "none:0", "--engine", engine.url) as sidecar,
    ):
        PrimeTrainer(prime_data, output).train(sidecar.keep_up)
        sidecar.wait()
        version = engine.version()
    assert version == "1"
    policy = run.get("policy").json()
    assert (policy["version"], policy["weights_uri"]) == (1, (output / "broadcasts" / "step_1").as_uri())


def test_stop_ends_a_sidecar_whose_service_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Client("http://127.0.0.1:9", "main") as client:
        sidecar = Sidecar(client, SidecarOptions(output_dir=tmp_path))
        thread = threading.Thread(target=sidecar.run)
        thread.start()
        eventually(lambda: "retrying" in caplog.text, lambda: None)
        sidecar.stop()
        thread.join()
    assert not thread.is_alive()


def test_an_engine_that_is_away_ends_the_sidecar_with_its_address(
    fed: RunClient, prime_data: Any, tmp_path: Path
) -> None:
    """A supervisor starts it again; the version is not published."""
    PrimeTrainer(prime_data, tmp_path)
    with pytest.raises(SystemExit, match=r"POST http://127.0.0.1:9/pause"):
        main([*options_of(fed, tmp_path), "--engine", "http://127.0.0.1:9"])
