"""Tasks of reasoning-gym as rows of prompts."""

from __future__ import annotations

import functools
import json
from typing import Any

from replaybuf.errors import Invalid, MissingExtra

EXTRA = "demo"
METADATA_KEY = "reasoning_gym"
"""Metadata of a prompt that name its dataset: `{"dataset": NAME, "entry": {...}, "config": {...}}`."""
_BLOCK = 1000


def gym_row(name: str, options: dict[str, Any], number: int) -> dict[str, Any]:
    """Generate one task of a dataset as the row of a prompt, with the metadata from which it is scored."""
    block, place = divmod(number, _BLOCK)
    entry = _block(name, json.dumps(options, sort_keys=True), block)[place]
    config = {option: value for option, value in options.items() if option not in ("seed", "size")}
    task = {"dataset": name, "entry": entry, "config": config}
    return {"prompt": entry["question"], "answer": entry["answer"], "metadata": {METADATA_KEY: task}}


@functools.lru_cache(maxsize=8)
def _block(name: str, options: str, block: int) -> Any:
    # In blocks, because some datasets generate all their tasks at once. Most derive task i from seed + i, so blocks
    # do not overlap.
    config = json.loads(options)
    seed = config.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        detail = f"prompts reasoning-gym:{name}: seed is {seed!r}; it must be a whole number"
        raise Invalid(detail, name="seed", value=seed)
    return open_dataset(name, config | {"size": _BLOCK, "seed": seed + block * _BLOCK})


def open_dataset(name: str, config: dict[str, Any]) -> Any:
    """Open a dataset. Raises `MissingExtra`, and `Invalid` for an unknown name or option."""
    library = open_library()
    try:
        return library.create_dataset(name, **config)
    except Exception as error:  # its configuration classes raise anything, asserts too
        raise Invalid(f"cannot create reasoning-gym dataset {name!r}: {error}", name="dataset") from error


def open_library() -> Any:
    """Return the package. Raises `MissingExtra`."""
    try:
        import reasoning_gym
    except ImportError:
        raise MissingExtra("the environment reasoning-gym", EXTRA) from None
    return reasoning_gym
