"""Conversations to token ids, by the renderer that verifiers' client uses between turns."""

from __future__ import annotations

import functools
import json
import typing
from pathlib import Path
from typing import Any

from .faults import Unfit, told
from .messages import Rendering

BY_MODEL_TYPE = {
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
}
"""Renderers by `model_type` of `config.json`; taken where they write what the folder's chat template writes."""


def renderer_config(rendering: Rendering) -> Any:
    """Return the configuration of the renderer, of the package `renderers`.

    Raises `Unfit` where it is none, or none is named and the model tells none.
    """
    return _checked(rendering.tokenizer, json.dumps(rendering.renderer, sort_keys=True))


@functools.cache
def _checked(folder: str, renderer: str) -> Any:
    # Once, not for every task and play: reading the folder and building the check take 2 ms.
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig

    given = json.loads(renderer) or {"name": _by_model_type(Path(folder))}
    try:
        return TypeAdapter(RendererConfig).validate_python(given)
    except ValidationError as error:
        why = ", ".join(f"{'.'.join(map(str, one['loc']))} {one['msg']}" for one in error.errors())
        raise Unfit(f"renderer {given} is none: {why.strip()}; {_name_one()}") from error


def _by_model_type(folder: Path) -> str:
    file = folder / "config.json"
    model_type = json.loads(file.read_text()).get("model_type") if file.is_file() else None
    if model_type not in BY_MODEL_TYPE:
        raise Unfit(f"no renderer is known for model_type {model_type!r} of {folder}; {_name_one()}")
    return BY_MODEL_TYPE[model_type]


def opening_ids(rendering: Rendering, messages: list[Any], tools: list[dict[str, Any]]) -> list[int]:
    """Render the start of a conversation, up to where the first turn begins.

    Raises `Unfit` where the renderer does not fit the tokenizer, as one whose markers that does not know.
    """
    from verifiers.v1.dialects.chat import message_to_wire

    wire = [message_to_wire(message) for message in messages]
    renderer = _renderer(rendering.tokenizer, renderer_config(rendering))
    ids: list[int] = renderer.render(wire, tools=tools or None, add_generation_prompt=True).token_ids
    return ids


def check_template(rendering: Rendering, messages: list[Any], tools: list[dict[str, Any]]) -> None:
    """Hold a renderer that nobody named against the folder's chat template. Raises `Unfit` where they differ.

    Fine-tunes keep their model's type and may have another template. One that is named is its user's choice.
    """
    from verifiers.v1.dialects.chat import message_to_wire

    tokenizer = _tokenizer(rendering.tokenizer)
    if rendering.renderer or not tokenizer.chat_template:
        return
    wire = [message_to_wire(message) for message in messages]
    written = tokenizer.apply_chat_template(
        wire, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    if list(written) != opening_ids(rendering, messages, tools):
        name = renderer_config(rendering).name
        raise Unfit(
            f"renderer {name} does not write what the chat template of {rendering.tokenizer} does; {_name_one()}"
        )


@functools.cache
def _tokenizer(folder: str) -> Any:
    from renderers.base import load_tokenizer

    try:
        return load_tokenizer(folder)
    except Exception as error:
        raise Unfit(f"tokenizer {folder} does not load: {told(error)}") from error


@functools.cache
def _renderer(folder: str, config: Any) -> Any:
    from renderers.base import create_renderer

    tokenizer = _tokenizer(folder)
    try:
        return create_renderer(tokenizer, config)
    except Exception as error:
        raise Unfit(f"renderer {config.name} cannot be made for {folder}: {told(error)}; {_name_one()}") from error


def _name_one() -> str:
    from renderers import RendererConfig

    (union, *_) = typing.get_args(RendererConfig)
    names = sorted(typing.get_args(kind.model_fields["name"].annotation)[0] for kind in typing.get_args(union))
    return f"name one: options = {{ renderer = {{ name = ... }} }}, of {', '.join(names)}"
