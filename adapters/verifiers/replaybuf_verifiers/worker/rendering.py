"""Conversations to token ids, with the renderer that verifiers' client uses between turns."""

from __future__ import annotations

import functools
import json
import typing
from pathlib import Path
from typing import Any

from .messages import Rendering, Unfit, described

CONFIG_BYTES = 1 << 20
BY_MODEL_TYPE = {"glm4_moe": "glm-4.5", "gpt_oss": "gpt-oss", "qwen3": "qwen3", "qwen3_moe": "qwen3"}
"""Default renderers by `model_type` of `config.json`; `check_template` compares them with the chat template."""


def renderer_config(rendering: Rendering) -> Any:
    """Return the configuration of the renderer, of the package `renderers`.

    Raises `Unfit` if it is invalid, or if none is named and the model's type has no default.
    """
    return _checked(rendering.tokenizer, json.dumps(rendering.renderer, sort_keys=True))


@functools.cache
def _checked(folder: str, renderer: str) -> Any:
    # Cached: reading the folder and building the check take 2 ms, for every task and play.
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig

    config = json.loads(renderer) or {"name": _by_model_type(Path(folder))}
    try:
        return TypeAdapter(RendererConfig).validate_python(config)
    except ValidationError as error:
        why = ", ".join(f"{'.'.join(map(str, fault['loc']))} {fault['msg']}" for fault in error.errors())
        raise Unfit(f"renderer {config} is invalid: {why.strip()}; {_name_one()}") from error


def _by_model_type(folder: Path) -> str:
    file = folder / "config.json"
    try:
        with file.open("rb") as opened:
            model_type = json.loads(opened.read(CONFIG_BYTES)).get("model_type")
    except FileNotFoundError:
        model_type = None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise Unfit(f"{file} cannot be read: {error}; {_name_one()}") from error
    if model_type not in BY_MODEL_TYPE:
        raise Unfit(f"model_type {model_type!r} of {folder} has no default renderer; {_name_one()}")
    return BY_MODEL_TYPE[model_type]


def opening_ids(rendering: Rendering, messages: list[Any], tools: list[dict[str, Any]]) -> list[int]:
    """Render the start of a conversation, up to the start of the first turn.

    Raises `Unfit` if the renderer does not fit the tokenizer, for example if that lacks its markers.
    """
    renderer = _renderer(rendering.tokenizer, renderer_config(rendering))
    ids: list[int] = renderer.render(_wire(messages), tools=tools or None, add_generation_prompt=True).token_ids
    return ids


def check_template(rendering: Rendering, messages: list[Any], tools: list[dict[str, Any]]) -> None:
    """Compare a default renderer with the folder's chat template. Raises `Unfit` if they differ.

    Fine-tunes keep their model's type and may have another template. A named renderer is the user's choice.
    """
    tokenizer = _tokenizer(rendering.tokenizer)
    if rendering.renderer or not tokenizer.chat_template:
        return
    expected = tokenizer.apply_chat_template(
        _wire(messages), tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    if list(expected) != opening_ids(rendering, messages, tools):
        name = renderer_config(rendering).name
        raise Unfit(f"renderer {name} differs from the chat template of {rendering.tokenizer}; {_name_one()}")


def _wire(messages: list[Any]) -> list[dict[str, Any]]:
    from verifiers.v1.dialects.chat import message_to_wire

    return [message_to_wire(message) for message in messages]


@functools.cache
def _tokenizer(folder: str) -> Any:
    from renderers.base import load_tokenizer

    try:
        return load_tokenizer(folder)
    except Exception as error:
        raise Unfit(f"tokenizer {folder} does not load: {described(error)}") from error


@functools.cache
def _renderer(folder: str, config: Any) -> Any:
    from renderers.base import create_renderer

    tokenizer = _tokenizer(folder)
    try:
        return create_renderer(tokenizer, config)
    except Exception as error:
        raise Unfit(f"renderer {config.name} does not fit {folder}: {described(error)}; {_name_one()}") from error


def _name_one() -> str:
    from renderers import RendererConfig

    (union, *_) = typing.get_args(RendererConfig)
    names = sorted(typing.get_args(kind.model_fields["name"].annotation)[0] for kind in typing.get_args(union))
    return f"name one: options = {{ renderer = {{ name = ... }} }}, of {', '.join(names)}"
