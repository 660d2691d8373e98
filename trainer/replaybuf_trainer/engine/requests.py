"""Bodies of the engine's calls, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request

from replaybuf.errors import Invalid
from replaybuf.wire.decoding import prepared

LARGEST_N = 1024
LONGEST_NAME = 255


class CompletionRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/completions`; other parameters of vLLM are ignored.

    `prompt`: a text, token ids, or several prompts of token ids, each completed `n` times.
    """

    prompt: list[int | list[int]] | str
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=LARGEST_N)] = 1
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    return_token_ids: bool = False
    top_p: Annotated[float, Meta(ge=1, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=0)] = 0
    stream: bool = False


class TokenizeRequest(msgspec.Struct, frozen=True):
    """Body of `POST /tokenize`."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class RpcRequest(msgspec.Struct, frozen=True):
    """Body of `POST /collective_rpc`; the only method is `reload_weights`."""

    method: str
    kwargs: dict[str, Any] = {}


class VersionRequest(msgspec.Struct, frozen=True):
    """Body of `POST /update_weight_version`: a whole number, as a number or a string; `model` None = the base model."""

    new_version: str | int
    model: str | None = None


class LoadLoraRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/load_lora_adapter`; `weight_version` is ours, a whole number as a number or a string."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False
    weight_version: str | int | None = None


class UnloadLoraRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


class InitInfo(msgspec.Struct, frozen=True):
    """How to join the group of a trainer. `packed_buffer_size_bytes`: size of its chunks."""

    master_address: str
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1)]
    world_size: Annotated[int, Meta(ge=2)]
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Meta(ge=1)] = 1 << 30


class InitTransfer(msgspec.Struct, frozen=True):
    """Body of `POST /init_weight_transfer_engine`."""

    init_info: InitInfo


class UpdateInfo(msgspec.Struct, frozen=True):
    """Names, types and shapes of the tensors of a transfer, in its order."""

    names: list[str]
    dtype_names: list[Literal["float32", "bfloat16", "float16"]]
    shapes: list[list[Annotated[int, Meta(ge=0)]]]


class UpdateWeights(msgspec.Struct, frozen=True):
    """Body of `POST /update_weights`."""

    update_info: UpdateInfo


class FinishUpdate(msgspec.Struct, frozen=True):
    """Body of `POST /finish_weight_update`."""

    weight_version: str | int | None = None


async def read(request: Request, shape: type[Any]) -> Any:
    """Decode the JSON body of a request. Raises `Invalid`."""
    try:
        return msgspec.json.decode(await request.body(), type=prepared(shape))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"body: {error}", name="body") from error


def whole_number(name: str, value: str | int) -> int:
    """Return the version in field `name` of a body. Raises `Invalid`."""
    try:
        return int(value)
    except ValueError:
        raise Invalid(f"{name} is {value!r}; it must be a whole number", name=name, value=value) from None
