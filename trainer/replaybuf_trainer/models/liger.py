"""Liger kernels (arXiv:2410.10989) in place of layers of a model: norms, rotary positions and gated MLPs.

They replace methods of the loaded model and keep the names of its parameters. Liger also replaces classes and functions
in the module of the architecture, so models of it that are loaded later in this process use the kernels too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replaybuf.errors import Invalid, MissingExtra

DEVICES = ("cuda",)
"""Types of devices that run the kernels, which are written in Triton."""


def liger_kernels(device: torch.device) -> Callable[[Any], None]:
    """Return the function that puts the kernels into a model on `device`; the model is not needed for these checks.

    Raises `Invalid` on another device than a GPU, `MissingExtra` without liger-kernel.
    """
    if device.type not in DEVICES:
        raise Invalid("liger needs a CUDA GPU; train without it", name="liger", value=device.type, bound="cuda")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply_to_model
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as SUPPORTED
    except ImportError:
        raise MissingExtra("liger of replaybuf train --model-options", "liger") from None

    def apply(model: Any) -> None:
        kind = model.config.model_type
        if kind not in SUPPORTED:  # liger itself would only log that it changes nothing
            raise Invalid(
                f"liger-kernel has no kernels for model_type {kind!r}; train without liger", name="liger", value=kind
            )
        # The trainer computes its loss from hidden states. The fused loss would replace the forward of the model, and
        # the other one torch.nn.functional.cross_entropy of the whole process.
        apply_to_model(model=model, cross_entropy=False, fused_linear_cross_entropy=False)

    return apply
