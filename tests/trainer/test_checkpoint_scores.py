"""`replaybuf eval --checkpoints`: the checkpoints of the reference trainer, scored by one engine that loads each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replaybuf.cli.main import main
from replaybuf.generator.engines import VllmEngine
from replaybuf.generator.prompts import Prompt
from replaybuf.wire.model.checkpoints import TrainerState
from replaybuf_trainer.checkpoints.checkpoints import Checkpoints
from replaybuf_trainer.models.loading import load_model
from replaybuf_trainer.models.policy import Policy
from replaybuf_trainer.parallel.ranks import Ranks
from tests.conftest import RunClient
from tests.trainer.served import ServedEngine

WORDS = ("abc", "hello", "replay", "buffer")


def write_checkpoint(folder: Path, step: int, model: Path, *, run: str = "r") -> Path:
    """Write the checkpoint of a model as the trainer does."""
    checkpoints = Checkpoints(folder, 9, Ranks(), lambda _: None, lambda: None)
    checkpoints.save(Policy(load_model(model), 1e-3, model), TrainerState(run=run, step=step, version=step))
    checkpoints.wait()
    return folder / f"step-{step:06d}"


@pytest.fixture
def folder(tmp_path: Path, models: Path) -> Path:
    """Checkpoints of step 20 and 3, with the weights of `a` and of `b`."""
    for step, name in ((20, "a"), (3, "b")):
        write_checkpoint(tmp_path / "checkpoints", step, models / name)
    return tmp_path / "checkpoints"


def words(engine: str, models: Path, folder: Path, *options: str) -> list[str]:
    """Return the arguments of the command. The reward is `letters` of the greedy completion."""
    prompts = models / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": word, "answer": word}) + "\n" for word in WORDS))
    return [
        *("eval", "--engine", engine, "--environment", "tests.trainer.test_checkpoint_scores:letters"),
        *("--prompts", str(prompts), "--tokenizer", str(models / "a"), "--max-tokens", "24"),
        *("--checkpoints", str(folder), *options),
    ]


def scored(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run the command with --json; return the entries of the checkpoints."""
    main([*arguments, "--json"])
    entries: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["checkpoints"]
    return entries


def letters(prompt: Prompt, completion: str) -> float:
    """Reward the letters: two models, which complete differently, get different rewards."""
    return float(sum(ord(letter) for letter in completion))


def mean_reward(engine: ServedEngine) -> float:
    """Return the mean reward of the greedy completions of the present weights, by a request of our own."""
    texts = [engine.complete(word, max_tokens=24, temperature=0)[0]["text"] for word in WORDS]
    return sum(sum(map(ord, text)) for text in texts) / len(texts)


def failure(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    """Run a command that fails; return its message."""
    with pytest.raises(SystemExit):
        main(list(arguments))
    return " ".join(capsys.readouterr().err.split())


def test_each_checkpoint_is_scored_with_its_own_weights_the_newest_last(
    engine: ServedEngine, models: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By number, not by name or age. The engine samples again afterwards, with the weights of the newest."""
    of_a = mean_reward(engine)
    engine.reload(models / "b", 7)
    of_b = mean_reward(engine)
    assert of_a != of_b
    entries = scored(capsys, words(engine.url, models, folder))
    assert [(entry["step"], entry["version"], entry["trained_run"]) for entry in entries] == [
        (3, 3, "r"),
        (20, 20, "r"),
    ]
    assert [entry["reward_mean"] for entry in entries] == [of_b, of_a]
    assert (engine.version(), mean_reward(engine)) == ("20", of_a)


def test_a_scored_checkpoint_is_not_scored_again_unless_asked(
    engine: ServedEngine, models: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new checkpoint is, and one with other weights under the same step, and all with another sampling."""
    arguments = words(engine.url, models, folder)
    first = scored(capsys, arguments)
    assert [entry["new"] for entry in first] == [True, True]
    write_checkpoint(folder, 30, models / "b")
    again = scored(capsys, arguments)
    assert [entry["new"] for entry in again] == [False, False, True]
    assert again[0] == first[0] | {"new": False}
    shutil.rmtree(folder / "step-000020")
    write_checkpoint(folder, 20, models / "b")
    assert [entry["new"] for entry in scored(capsys, arguments)] == [False, True, False]
    assert [entry["new"] for entry in scored(capsys, [*arguments, "--samples", "2"])] == [True, True, True]
    assert [entry["new"] for entry in scored(capsys, [*arguments, "--again"])] == [True, True, True]


def test_a_command_that_was_killed_goes_on_at_the_next_checkpoint(
    engine: ServedEngine,
    models: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = words(engine.url, models, folder)
    loads: list[str] = []

    reload = VllmEngine.load_weights

    async def load_or_die(self: VllmEngine, path: Path, version: int) -> None:
        loads.append(path.parent.name)
        if len(loads) == 2:
            raise KeyboardInterrupt
        await reload(self, path, version)

    monkeypatch.setattr(VllmEngine, "load_weights", load_or_die)
    with pytest.raises(SystemExit):
        main(arguments)
    capsys.readouterr()
    assert [entry["new"] for entry in scored(capsys, arguments)] == [False, True]
    assert loads == ["step-000003", "step-000020", "step-000020"]


def test_the_run_records_each_result(
    engine: ServedEngine, models: Path, folder: Path, run: RunClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.put(batch={"groups_per_batch": 1}).status_code == 201
    run.reach_version(20)
    scored(capsys, words(engine.url, models, folder, "--url", str(run.http.base_url), "--run", run.run))
    assert [result["version"] for result in run.get("evaluations").json()["evaluations"]] == [3, 20]


def test_a_folder_that_cannot_be_scored_is_one_error_before_anything_starts(
    models: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine listens at the address: nothing has asked it."""
    nowhere = "http://127.0.0.1:1"
    empty = tmp_path / "empty"
    assert "does not exist" in failure(capsys, words(nowhere, models, empty))
    empty.mkdir()
    assert "has no checkpoint" in failure(capsys, words(nowhere, models, empty))

    config = folder / "step-000003" / "model" / "config.json"
    whole = config.read_bytes()
    config.write_bytes(whole.replace(b'"hidden_size": ', b'"hidden_size":9'))
    assert "the crc32c of model/config.json is" in failure(capsys, words(nowhere, models, folder))
    config.write_bytes(whole[:-1])
    assert "model/config.json has" in failure(capsys, words(nowhere, models, folder))
    config.write_bytes(whole)

    other = tmp_path / "other"
    shutil.copytree(models / "a", other)
    (other / "config.json").write_bytes(whole.replace(b'"hidden_size": ', b'"hidden_size": 9'))
    arguments = [str(other) if word == str(models / "a") else word for word in words(nowhere, models, folder)]
    assert "has hidden_size" in failure(capsys, arguments)

    (folder / "scores.json").write_text("[")
    assert "scores.json is broken" in failure(capsys, words(nowhere, models, folder))


def test_options_that_contradict_checkpoints_are_named(
    models: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words("http://127.0.0.1:1", models, folder)
    assert "exactly one --engine" in failure(capsys, [*arguments, "--engine", "http://127.0.0.1:2"])
    assert "--adapter is 'x'" in failure(capsys, [*arguments, "--adapter", "x"])
    assert "vLLM's API" in failure(capsys, words("sglang+http://127.0.0.1:1", models, folder))
    assert "--again needs --checkpoints" in failure(capsys, [*arguments[:-2], "--again"])
