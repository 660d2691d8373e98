"""Model folders of the small engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replaybuf.errors import Invalid
from replaybuf.wire.model.shape import read_model_config
from replaybuf_trainer.models.loading import load_model

MODEL_TYPE = "qwen3"


def load_engine_model(folder: Path) -> Any:
    """Load a Qwen3 model folder in float32 on the CPU. Raises `Invalid` for another model type, and as `load_model`."""
    config = folder / "config.json"
    kind = read_model_config(config).get("model_type") if config.is_file() else MODEL_TYPE
    if kind != MODEL_TYPE:
        raise Invalid(
            f"model folder {folder} has model_type {kind!r}; the small engine serves {MODEL_TYPE!r} only; "
            "use vLLM for other models",
            name="model_type",
            value=kind,
            bound=MODEL_TYPE,
        )
    return load_model(folder)
