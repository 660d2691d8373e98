"""slime's own code from a checkout of the tested commit, on a machine without its engines.

What a CPU lacks is replaced by empty modules: ray, SGLang and trackers. Everything else that a batch passes through is
slime's.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.pinned_source import PinnedSource, stand_in

SOURCE = PinnedSource("slime", "https://github.com/THUDM/slime", "624b824a898ab0ec1fcb4d373004c7f3852bf515")
ABSENT = (
    "ray",
    "ray.util",
    "ray.util.scheduling_strategies",
    "sglang",
    "sglang.srt",
    "sglang.srt.constants",
    "slime.backends",
    "slime.backends.sglang_utils",
    "slime.backends.sglang_utils.external",
    "slime.backends.sglang_utils.sglang_config",
    "slime.backends.sglang_utils.sglang_engine",
    "slime.observability.logging_utils",
)


def load(folder: Path) -> Any:
    """Import slime from a checkout; return its class of the rollout manager, without ray."""
    sys.path.insert(0, str(folder))
    stand_in(ABSENT)
    ray: Any = sys.modules["ray"]
    ray.remote, ray.put = (lambda made: made), (lambda value: value)
    return importlib.import_module("slime.ray.rollout").RolloutManager
