"""Models that one engine serves by name: the base model and LoRA adapters on it, loaded and unloaded as in vLLM.

Rows hold the `ServedModel` they are sampled from. So a replacement takes effect at the next token of running rows, and
the last rows of an unloaded adapter end with its weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from replaybuf.errors import Invalid, NotFound
from replaybuf.wire.model.shape import read_model_config
from replaybuf_trainer.engine.lora import Lora
from replaybuf_trainer.models.loading import load_model

MOST_ADAPTERS = 256
"""As many as one run may have."""
MODEL_TYPE = "qwen3"


@dataclasses.dataclass(slots=True, eq=False)
class ServedModel:
    """A name that requests ask for; only the worker changes it once it is served.

    `version`: of its present weights; `lora`: None for the base model; `folder`: where its weights come from.
    """

    name: str = ""
    version: int = 0
    lora: Lora | None = None
    folder: str = ""


class ServedModels:
    """The base model and its adapters by name.

    `read` reads an adapter folder; `replace` sets the weights and the version of an adapter between two tokens, or
    keeps the version where it gets None.
    """

    def __init__(
        self,
        base: ServedModel,
        read: Callable[[Path], Lora],
        replace: Callable[[ServedModel, Lora, int | None], Future[None]],
    ) -> None:
        self.base = base
        self.adapters: dict[str, ServedModel] = {}
        self._read = read
        self._replace = replace
        self._changing = asyncio.Lock()

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a name, None = the base model. Raises `NotFound`."""
        if name in (None, self.base.name):
            return self.base
        if adapter := self.adapters.get(name):
            return adapter
        served = [self.base.name, *self.adapters]
        raise NotFound(f"model {name!r} does not exist; this server has {served}", name="model", value=name)

    async def load(self, name: str, folder: str, version: int | None, *, in_place: bool) -> None:
        """Load an adapter. A new adapter without a version has version 0.

        Raises `Invalid` for a name that is served already (unless `in_place`) and for more adapters than the maximum;
        otherwise as `read_lora`. After an error the old weights stay.
        """
        async with self._changing:  # two loads of one name must not overtake each other
            loaded = self.adapters.get(name)
            self._check_name(name, loaded, in_place=in_place)
            lora = await asyncio.to_thread(self._read, Path(folder))
            if loaded is None:
                self.adapters[name] = ServedModel(name, version or 0, lora, folder)
            else:
                await asyncio.wrap_future(self._replace(loaded, lora, version))
                loaded.folder = folder

    async def unload(self, name: str) -> None:
        """Serve an adapter no more; its running rows end as they would. Raises `NotFound`."""
        async with self._changing:
            if self.adapters.pop(name, None) is None:
                detail = f"the LoRA adapter {name!r} cannot be found; loaded are {list(self.adapters)}"
                raise NotFound(detail, name="lora_name", value=name)

    def _check_name(self, name: str, loaded: ServedModel | None, *, in_place: bool) -> None:
        if name == self.base.name:
            raise Invalid(f"lora_name is {name!r}, the name of the base model", name="lora_name", value=name)
        if loaded is not None and not in_place:
            detail = f"the LoRA adapter {name!r} is already loaded; set load_inplace to true to replace it"
            raise Invalid(detail, name="lora_name", value=name)
        if loaded is None and len(self.adapters) >= MOST_ADAPTERS:
            detail = f"{len(self.adapters)} LoRA adapters are loaded; the maximum is {MOST_ADAPTERS}; unload one first"
            raise Invalid(detail, name="lora_name", value=name, bound=MOST_ADAPTERS)


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
