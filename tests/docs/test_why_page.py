"""docs/why.md: every command shows what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = (ROOT / "docs" / "why.md").read_text().split("\n## ")[1:]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_the_command_of_a_question_prints_what_the_page_says(section: str) -> None:
    """Each question has an answer elsewhere, one command, and a cost."""
    (block,) = re.findall(r"^```sh\n(.*?)\n^```", section, re.DOTALL | re.MULTILINE)
    program, *arguments = shlex.split(block)
    command = [str(Path(sys.executable).with_name(Path(program).name)), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "https://github.com/" in section and "**Cost.**" in section
    if expected := re.findall(r"^    (\S.*)$", section, re.MULTILINE):
        assert done.stdout.splitlines() == expected
    else:  # the simulator: figures of the text are those of its table
        printed = re.sub(r" +", " ", done.stdout)
        for figures in ("steps per hour 58.2 54.1", "wasted 13% of tokens 0% of tokens", "length bias 0.932"):
            assert figures in printed
        assert all(figure in section for figure in ("58.2", "54.1", "13 %", "0.93 and 1.00"))
