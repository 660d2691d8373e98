"""Groups as text, where the service was given a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import RunClient, ServeProcess, Starter, group
from tests.forked import run_forked
from tests.generator.doubles import LETTERS, ids, write_tokenizer

Connect = Callable[[str, str], RunClient]
END = len(LETTERS)


def test_a_group_that_is_looked_at_shows_its_text(tmp_path: Path, connect: Connect, started: Starter) -> None:
    """Prompt and completion of each rollout beside the ids, special tokens written out, unknown ids left out."""
    server = started(ServeProcess(tmp_path / "data", "--tokenizer", str(write_tokenizer(tmp_path / "model"))))
    run = connect(server.url, "r")
    run.put(batch={"groups_per_batch": 1})
    shown = group("a")
    for rollout, completion in zip(shown["rollouts"], ([*ids("ba"), END], [*ids("c"), 10_000, END]), strict=True):
        rollout |= {"prompt_ids": ids("ab"), "completion_ids": completion}
    run.append(shown)
    rollouts = run.get("groups/a").json()["rollouts"]
    assert [rollout["prompt_text"] for rollout in rollouts] == ["ab", "ab"]
    assert [rollout["completion_text"] for rollout in rollouts] == ["ba</s>", "c</s>"]
    assert [rollout["completion_ids"] for rollout in rollouts] == [[*ids("ba"), END], [*ids("c"), 10_000, END]]
    assert not any("completion_pieces" in rollout for rollout in rollouts)
    split = run.get("groups/a", pieces="true").json()["rollouts"]
    assert [rollout["completion_pieces"] for rollout in split] == [["b", "a", "</s>"], ["c", "", "</s>"]]


def test_without_a_tokenizer_there_is_no_text(run: RunClient) -> None:
    """Fields that could not be right are not there."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    assert all("completion_text" not in rollout for rollout in run.get("groups/a").json()["rollouts"])


def test_a_folder_without_a_tokenizer_keeps_the_service_from_starting(tmp_path: Path) -> None:
    """It names the folder and what it lacks, and leaves no Valkey behind."""
    command = ["serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--tokenizer", str(tmp_path)]
    ended = run_forked("replaybuf", command)
    assert ended.returncode == 1
    assert f"tokenizer folder {tmp_path} has no tokenizer.json" in ended.stderr
    assert not (tmp_path / "data").exists()
