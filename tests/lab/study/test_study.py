"""A whole study with real processes and a tiny model: `docs/study.md` has its file, with larger numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.trainer.served import write_model
from tests.waiting import patience

PAGE = Path(__file__).parents[3] / "docs" / "study.md"
SIZES = {"seeds": "[1]", "steps": "3", "checkpoints": "2", "samples": "2"}
TIMEOUT_S = 300.0
WORDS = ("abc", "bcd", "cab", "dab")


def tiny_file(folder: Path) -> Path:
    """Write the file of the page with tiny sizes and a model of random weights."""
    text = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert text is not None
    content = text[1]
    for key, value in SIZES.items():
        content = re.sub(rf"^{key} = .*$", f"{key} = {value}", content, flags=re.MULTILINE)
    head = 'model = "model"\nenvironment = "exact-match"\ngroups_per_batch = 2\n'
    path = folder / "study.toml"
    path.write_text(head + content)
    write_model(folder / "model", 0)
    lines = "".join(json.dumps({"prompt": f"{word}>", "prompt_id": word, "answer": word}) + "\n" for word in WORDS)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        (folder / "model" / name).write_text(lines)
    return path


def results(file: Path) -> dict[str, Any]:
    """Run the study; return its JSON."""
    command = [sys.executable, "-m", "replaybuf", "study", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S * patience())
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.mark.timeout(900)  # two runs of four processes each, a minute alone; many times that on a loaded machine
def test_the_study_of_the_page_trains_scores_and_reports(tmp_path: Path) -> None:
    """The second call runs nothing again."""
    file = tiny_file(tmp_path)
    result = results(file)
    data = tmp_path / result["settings"]["data_dir"]
    assert [strategy["title"] for strategy in result["strategies"]] == ["one-use", "replay-4"]
    for strategy in result["strategies"]:
        (training,) = strategy["trainings"]
        steps, tokens, seconds = (
            [point[name] for point in training["points"]] for name in ("step", "tokens", "wall_s")
        )
        assert steps == [0, 2, 3]
        assert 0 == tokens[0] < tokens[1] <= tokens[2] and 0 == seconds[0] < seconds[1] < seconds[2]
    assert json.loads((data / "study.json").read_text()) == result
    ElementTree.parse(data / "study.svg")

    trained = {path: path.stat().st_mtime_ns for path in data.glob("trainings/*/costs.json")}
    assert results(file) == result
    assert {path: path.stat().st_mtime_ns for path in data.glob("trainings/*/costs.json")} == trained
