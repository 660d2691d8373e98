"""The repeated layers of a model: activation checkpointing and compilation, one layer at a time.

Both replace the `forward` of a layer and keep the names of its parameters, so weights and checkpoints stay the same.
Compile first, then checkpoint, then shard: each works without the others, and the hooks of FSDP stay outside.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from replaybuf.errors import Invalid


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the layers of a model, first to last. Raises `Invalid` for a model whose layers are not marked as such."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise Invalid(
            f"the layers of {type(model).__name__} are not known to transformers; train it without "
            "activation_checkpointing and compile",
            name="model",
            value=type(model).__name__,
        )
    return layers


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile each layer by torch.compile, for rows of any length; equal layers share the compiled code.

    The first forward and backward pass take minutes. Raises `Invalid` on a CPU without a C++ compiler.
    """
    compiler = os.environ.get("CXX")
    has_compiler = any(shutil.which(name) for name in ([compiler] if compiler else ["g++", "clang++"]))
    if next(model.parameters()).device.type == "cpu" and not has_compiler:
        raise Invalid(
            f"compile needs a C++ compiler on the CPU: {compiler or 'g++ or clang++'} is not installed; "
            "install it, set CXX, or train without compile",
            name="compile",
            value=compiler,
        )
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def checkpoint_activations(model: Any, interval: int = 1) -> None:
    """Keep only the inputs of each layer for the backward pass, which runs the layer again (arXiv:1604.06174).

    `interval` n: of the first layer and of every n-th after it. 1 or more.
    transformers has the same as an option, but only for models in training mode, with their dropout.
    """
    for layer in decoder_layers(model)[::interval]:
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # dropout is off, so the second pass needs no random state of the first
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
