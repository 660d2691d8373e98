"""What the package promises to those who import it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import replaybuf
from replaybuf import AsyncClient, Client


def test_the_public_names_are_these() -> None:
    """A new name, or a lost one, is a decision."""
    assert replaybuf.__all__ == ["AsyncClient", "Client", "__version__"]
    assert (Client.__name__, AsyncClient.__name__) == ("Client", "AsyncClient")


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As for any module."""
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = replaybuf.Nothing


@pytest.mark.parametrize("module", ["replaybuf.cli.main", "replaybuf.service.server", "replaybuf.kernel.strategy"])
def test_the_core_loads_neither_torch_nor_a_concrete_strategy(module: str) -> None:
    """Checked in a process of its own; the linter checks the imports, this what they bring in."""
    found = f"import sys, {module}; print([m for m in sys.modules if m.startswith(('torch', 'replaybuf_'))])"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_strategy_plug_in_needs_no_http_library() -> None:
    """`replaybuf.kernel.strategy` stands on numpy and msgspec."""
    found = "import sys, replaybuf.kernel.strategy; print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
