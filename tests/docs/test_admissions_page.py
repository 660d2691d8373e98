"""docs/admissions.md: its plug-in works and keeps the contract; its table has the attributes of the class."""

from __future__ import annotations

import hmac
import re
from pathlib import Path
from typing import Any

import pytest

from replaybuf.kernel.strategy.admission_plugin import Admission
from replaybuf.wire.group import group_from_json
from tests.builders import rollout, wire_group

PAGE = (Path(__file__).parents[2] / "docs" / "admissions.md").read_text()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the code of the page."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/admissions.md", "exec"), names)
    return names


def test_the_plug_in_of_the_page_admits_what_is_signed_with_its_key(names: dict[str, Any]) -> None:
    suite = names["TestSigned"]()
    suite.test_it_keeps_the_contract_of_an_admission_plug_in()
    plain = group_from_json(wire_group(rollout()))
    proof = hmac.digest(b"secret", plain.completion_ids.tobytes(), "sha256")
    signed = group_from_json(wire_group(rollout(proof=proof)))
    forged = group_from_json(wire_group(rollout(proof=proof[::-1])))
    assert suite.build().check(signed) is None
    assert suite.build().check(forged).reason == "wrong_signature"


def test_every_attribute_of_a_plug_in_is_in_the_table() -> None:
    for name in ("Options", "reasons", "requires"):
        assert hasattr(Admission, name) and f"| `{name}` |" in PAGE
