"""docs/one-gpu.md: its file is one that `replaybuf up` takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from replaybuf.launch.file import decode_file

PAGE = (Path(__file__).parents[2] / "docs" / "one-gpu.md").read_text()


def test_the_file_of_the_page_has_no_problem() -> None:
    """Each key exists, with a value within its bounds; so do the keys that the page tells to change."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    tables = tomllib.loads(text)
    assert decode_file(tables).problems == []
    table = PAGE.partition("| you see | do |")[2].partition("\n## ")[0]
    changes = [tomllib.loads(change) for change in re.findall(r"`([\w.]+ = [^`{]+)`", table)]
    tables["trainer"] |= {key: value for change in changes for key, value in change.items() if key != "max_staleness"}
    assert decode_file(tables).problems == []
    assert {"model_options", "lora_rank"} <= tables["trainer"].keys()
