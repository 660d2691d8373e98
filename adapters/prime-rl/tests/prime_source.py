"""prime-rl's own transport and data loader from a checkout of the tested commit.

Its configurations need Python 3.12 and pydantic; empty modules stand in for them. The files, the transport's reader and
the conversion to tensors are prime-rl's.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.pinned_source import PinnedSource, stand_in

SOURCE = PinnedSource(
    "prime-rl", "https://github.com/PrimeIntellect-ai/prime-rl", "559b44772e471d1538537b8805cc77f3824a5e64"
)
PACKAGE = Path("src", "prime_rl")


def load(folder: Path) -> Any:
    """Import prime-rl's data loader from a checkout; return its module."""
    sys.path.insert(0, str(folder / "src"))
    stand_in(("prime_rl.configs", "prime_rl.configs.shared", "prime_rl.configs.trainer", "prime_rl.trainer.world"))
    return importlib.import_module("prime_rl.trainer.rl.data")
