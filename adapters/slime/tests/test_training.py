"""slime's rollout manager trains from a run: what arrives, and what a kill -9 in every phase changes: nothing."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slime_loop import PHASES, manager_of, train

from replaybuf.errors import Conflict, ReplaybufError
from tests.conftest import RunClient, ServeProcess
from tests.ticket_producer import WEIGHTED, Rows, producing, recorded_rows
from tests.waiting import patience

PROMPTS, SAMPLES, ROLLOUTS = 2, 2, 5
CONFIG: dict[str, Any] = {
    "batch": {"groups_per_batch": PROMPTS, "tokens_per_batch": None, "seq_len": 16},
    "group_size": SAMPLES,
}
TIMEOUT_S = 90.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["slime_preload"])


@pytest.fixture
def fed(run: RunClient, service: ServeProcess) -> Iterator[RunClient]:
    """Create a run with a producer."""
    assert run.put(**CONFIG).status_code == 201
    with producing(service.url, run.run):
        yield run


def arguments(run: RunClient, folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {
        "replaybuf_url": str(run.http.base_url),
        "replaybuf_run": run.run,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES,
        "num_rollout": ROLLOUTS,
        "save": str(folder),
    }
    return settings | {"save_interval": 1} | changes


def start(source: Path, settings: dict[str, Any]) -> int | None:
    """Run a training in a process of its own; return its exit code."""
    process = FORKS.Process(target=train, args=(source, settings))
    process.start()
    process.join(TIMEOUT_S * patience())
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def trained_model(folder: Path) -> list[Rows]:
    """Return the tokens that trained the model of the last checkpoint, by step."""
    steps = json.loads((folder / f"{ROLLOUTS - 1}.model").read_text())
    return [[tuple(row) for row in rows] for rows in steps]


def test_slimes_manager_gets_the_values_of_the_groups(fed: RunClient, source: Path, tmp_path: Path) -> None:
    """By its own conversion: lengths, masks, logprobs, rewards normalised by group; every rank has its part."""
    manager = manager_of(source, arguments(fed, tmp_path))
    try:
        manager.load(-1)
        ranks = [box.inner for box in manager.generate(0)]
    finally:
        manager.data_source.close()
    rows: dict[tuple[int, ...], tuple[Any, ...]] = {}
    for rank in ranks:
        assert len(rank["tokens"]) == PROMPTS * SAMPLES // 2
        columns = ("response_lengths", "loss_masks", "rollout_log_probs", "rewards")
        for number, tokens in enumerate(rank["tokens"]):
            values = [rank[name][number] for name in columns]
            rows[tuple(map(int, tokens))] = tuple(np.asarray(value).tolist() for value in values)
    assert [sorted(rows)] == recorded_rows(fed, 1)
    for tokens, (length, mask, logprobs, reward) in rows.items():
        answers = tokens[3] == 5
        assert (length, mask) == ((2, [1, 1]) if answers else (3, [1, 0, 1]))
        assert logprobs == ([-0.25, -0.5] if answers else [-0.25, 0.0, -1.0])
        assert reward == pytest.approx(0.7071 if answers else -0.7071, abs=1e-3)


@pytest.mark.parametrize("ahead", [0, 1], ids=["train.py", "train_async.py"])
def test_a_training_acks_publishes_and_records_its_steps(
    fed: RunClient, source: Path, tmp_path: Path, ahead: int
) -> None:
    assert start(source, arguments(fed, tmp_path, save_interval=2, replaybuf_steps_ahead=ahead)) == 0
    state = fed.state()
    published = ROLLOUTS - 1 - ahead  # the last rollout was asked for then
    assert (state["step"], state["published_version"], state["checkpoints"]) == (ROLLOUTS, published, [ROLLOUTS])
    assert trained_model(tmp_path) == recorded_rows(fed, ROLLOUTS)


def test_a_version_is_published_after_its_weights_are_loaded(fed: RunClient, source: Path, tmp_path: Path) -> None:
    """slime saves a step, then loads its weights into the engines, then asks for the next rollout."""
    manager = manager_of(source, arguments(fed, tmp_path))
    with contextlib.closing(manager.data_source):
        manager.load(-1)
        manager.generate(0)
        manager.save(0)
        assert (fed.state()["step"], fed.state()["published_version"]) == (1, 0)
        manager.generate(1)
        assert fed.state()["published_version"] == 1


def test_a_checkpoint_between_two_publications_is_refused(run: RunClient, source: Path, tmp_path: Path) -> None:
    """slime would load its weights into the engines, whose version would then have two sets of weights."""
    run.put(**CONFIG | {"steps_per_publish": 2})
    changes = {"replaybuf_steps_ahead": 1, "update_weights_interval": 2, "num_rollout": 4}
    with pytest.raises(ReplaybufError, match="--save-interval is 3; needed: a multiple of --update-weights-interval 2"):
        manager_of(source, arguments(run, tmp_path, save_interval=3, **changes))
    manager = manager_of(source, arguments(run, tmp_path, save_interval=2, **changes))
    with contextlib.closing(manager.data_source):
        with pytest.raises(ReplaybufError, match="the checkpoint has 3 steps, and a version has 2"):
            manager.load(2)
        assert run.state()["epoch"] == 0


def test_engine_logprobs_that_no_loss_uses_are_a_warning(fed: RunClient, source: Path, tmp_path: Path) -> None:
    settings = arguments(fed, tmp_path)
    with pytest.warns(UserWarning, match="does not use the logprobs of their engines; add --use-rollout-logprobs"):
        manager_of(source, settings | {"use_rollout_logprobs": False}).data_source.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager_of(source, settings | {"use_rollout_logprobs": False, "use_tis": True}).data_source.close()


@pytest.mark.parametrize("ahead", [0, 1], ids=["train.py", "train_async.py"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_killed_in_any_phase_trains_each_step_once(
    fed: RunClient, source: Path, tmp_path: Path, phase: str, ahead: int
) -> None:
    """Its model in the end is what the surviving history says, step by step, and no group is in two steps."""
    settings = arguments(fed, tmp_path, save_interval=2, replaybuf_steps_ahead=ahead)
    step = 0 if phase == "attached" else 3 if phase in ("model_saved", "recorded") else 2
    assert start(source, settings | {"kill_at": f"{phase}:{step}"}) == -9
    assert start(source, settings) == 0
    model = trained_model(tmp_path)
    assert model == recorded_rows(fed, ROLLOUTS)
    rows = [row for rows in model for row in rows]
    assert len(rows) == len(set(rows)) == ROLLOUTS * PROMPTS * SAMPLES
    state = fed.state()
    assert (state["step"], state["checkpoints"]) == (ROLLOUTS, [ROLLOUTS])


@pytest.mark.parametrize("ahead", [0, 1], ids=["train.py", "train_async.py"])
def test_the_report_of_the_last_checkpoint_is_repeated_at_the_next_start(
    fed: RunClient, source: Path, tmp_path: Path, ahead: int
) -> None:
    """The trainer was killed between its last checkpoint and the report; then nothing is left to train."""
    settings = arguments(fed, tmp_path, save_interval=2, replaybuf_steps_ahead=ahead)
    assert start(source, settings | {"kill_at": f"model_saved:{ROLLOUTS - 1}"}) == -9
    assert fed.state()["checkpoints"] == [ROLLOUTS - 1]
    assert start(source, settings) == 0
    state = fed.state()
    assert (state["step"], state["checkpoints"]) == (ROLLOUTS, [ROLLOUTS])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_global_dataset": False}, "--disable-rollout-global-dataset is set; needed: not set"),
        ({"colocate": False}, "replaybuf_steps_ahead is None; needed: 0 for train.py, 1 for train_async.py"),
        ({"replaybuf_run": None}, "replaybuf_run is None; needed: the name of a run"),
        ({"rollout_batch_size": 3}, "batch.groups_per_batch is 2; needed: 3 (--rollout-batch-size)"),
        ({"n_samples_per_prompt": 4}, "group_size is 2; needed: 4 (--n-samples-per-prompt)"),
        (
            {"replaybuf_steps_ahead": 1, "update_weights_interval": 2, "num_rollout": 4, "save_interval": 2},
            "steps_per_publish is 1; needed: 2 (--update-weights-interval)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_named_before_training(
    fed: RunClient, source: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ReplaybufError) as caught:
        manager_of(source, arguments(fed, tmp_path) | change)
    assert message in str(caught.value)


def test_a_live_change_of_the_batches_is_refused(fed: RunClient, source: Path, tmp_path: Path) -> None:
    """slime would drop rollouts of a larger batch. One that was made before is an error with the way out."""
    manager = manager_of(source, arguments(fed, tmp_path))
    with contextlib.closing(manager.data_source):
        manager.load(-1)
        answer = fed.http.patch(fed.path, json={"batch": {"groups_per_batch": 2 * PROMPTS}})
        assert (answer.status_code, answer.json()["name"]) == (409, "fixed")
        manager.data_source._needed = manager.data_source._needed._replace(rollouts=PROMPTS)
        with pytest.raises(Conflict, match=r"step 0 has 4 rollouts .* needed: 2 \(rollout_batch_size 2 x"):
            manager.generate(0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"adapters": {"a": {"groups_per_batch": 2}}, "batch": {}},
            "adapters is ['a']; needed: [] (slime trains one policy)",
        ),
        ({"batch": CONFIG["batch"] | {"tokens_per_batch": 64}}, "batch.tokens_per_batch is 64; needed: None"),
        ({"steps_per_publish": 2}, "steps_per_publish is 2; needed: 1"),  # as with --release-train
    ],
)
def test_a_run_that_does_not_fit_is_named(
    run: RunClient, source: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    answer = run.put(**CONFIG | config)
    assert answer.status_code == 201, answer.text
    with pytest.raises(ReplaybufError) as caught:
        manager_of(source, arguments(run, tmp_path))
    assert message in str(caught.value)


def test_another_release_of_slime_is_a_warning(
    fed: RunClient, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "slime-9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: slime\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match="slime is 9.9; replaybuf-slime is tested with 0.3.1"):
        manager_of(source, arguments(fed, tmp_path)).data_source.close()


def test_a_checkpoint_of_another_run_is_named(fed: RunClient, source: Path, tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "replaybuf_0.json").write_text('{"run": "other", "steps_done": 1}')
    manager = manager_of(source, arguments(fed, tmp_path))
    with pytest.raises(ReplaybufError, match="is a checkpoint of run other; replaybuf_run is run-"):
        manager.load(0)
    with pytest.raises(ReplaybufError, match=r"has 7 steps done; needed: steps that the run .* delivered"):
        manager.load(6)
    manager.data_source.close()


def test_a_loop_that_the_strategy_does_not_allow_ends_instead_of_waiting(
    run: RunClient, source: Path, tmp_path: Path
) -> None:
    """`on-policy` gives step 1 after the ack of step 0, which `train_async.py` sends later."""
    run.put(**CONFIG | {"strategy": {"name": "on-policy"}})
    manager = manager_of(source, arguments(run, tmp_path, replaybuf_steps_ahead=1))
    try:
        with producing(str(run.http.base_url), run.run):
            manager.load(-1)
            manager.generate(0)
            with pytest.raises(ReplaybufError, match="awaiting_ack would never end: the strategy does not allow"):
                manager.generate(1)
    finally:
        manager.data_source.close()


def test_sampling_weights_are_rejected(run: RunClient, source: Path, tmp_path: Path) -> None:
    run.put(**CONFIG | {"strategy": WEIGHTED})
    manager = manager_of(source, arguments(run, tmp_path))
    with producing(str(run.http.base_url), run.run), contextlib.closing(manager.data_source):
        manager.load(-1)
        with pytest.raises(ReplaybufError, match="weights, which slime cannot apply; set its option importance to 0"):
            manager.generate(0)


def test_evaluation_and_other_data_sources_are_rejected(fed: RunClient, source: Path, tmp_path: Path) -> None:
    manager = manager_of(source, arguments(fed, tmp_path))
    with pytest.raises(ReplaybufError, match="--eval-function-path is this function; set it to slime"):
        manager.generate_rollout(manager.args, 0, manager.data_source, evaluation=True)
    with pytest.raises(ReplaybufError, match="--data-source-path is str; needed: replaybuf_slime"):
        manager.generate_rollout(manager.args, 0, "other")
    with pytest.raises(RuntimeError, match="samples come from the producers of the run"):
        manager.data_source.get_samples(1)
    with pytest.raises(ReplaybufError, match="the prompts of the run are endless; set --num-rollout"):
        len(manager.data_source)
    manager.data_source.close()


def test_the_data_source_has_the_methods_of_slimes(source: Path) -> None:
    from slime.rollout.data_source import DataSource

    from replaybuf_slime import ReplaybufDataSource

    assert all(callable(getattr(ReplaybufDataSource, name)) for name in DataSource.__abstractmethods__)
