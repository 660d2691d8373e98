"""The policy in training: a model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from replaybuf.errors import Invalid
from replaybuf_trainer.losses import LossTokens, Row, loss_tokens
from replaybuf_trainer.models.cost import model_cost
from replaybuf_trainer.models.descent import Tensors, adam, descend, make_moments, parameter_state
from replaybuf_trainer.models.isolation import check_isolation
from replaybuf_trainer.models.layers import checkpoint_activations, compile_layers
from replaybuf_trainer.models.liger import liger_kernels
from replaybuf_trainer.models.loading import load_model, save_model
from replaybuf_trainer.models.packed_forward import packed_logprobs
from replaybuf_trainer.models.sharding import ShardedForward
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.ranks import Ranks, whole
from replaybuf_trainer.publishers.publisher import Weights


class Policy:
    """A float32 model with AdamW. `tokenizer_dir`: the folder whose tokenizer goes with saved weights.

    `cost`: operations of a forward pass over a rollout. `dtype`: type in which the layers compute. With bfloat16 they
    compute under autocast, as torchtitan does on one device. The float32 weights are the only copy: no master weights
    beside them, and gradients of micro-batches add up in float32. The output layer, logprobs and loss stay in float32.

    With several `ranks` every parameter is sharded over them; all ranks make the same calls.
    """

    def __init__(
        self,
        model: Any,
        learning_rate: float,
        tokenizer_dir: Path,
        ranks: Ranks | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.cost = model_cost(model)
        self._ranks = ranks or Ranks()
        self._sharded = ShardedForward(model, self._ranks, dtype) if self._ranks.sharded else None
        self.optimizer = adam(model.parameters(), learning_rate)
        self._tokenizer_dir = tokenizer_dir

    @property
    def device(self) -> torch.device:
        """Device of the forward pass."""
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.model.config.get_text_config().vocab_size)

    def own_steps(self, step: int) -> Mapping[str, int]:
        """Return the own steps done of each adapter after `step` steps; a whole model is the adapter ""."""
        return {"": step}

    def forward(self, rows: Sequence[Row], adapter: str = "") -> LossTokens:
        """Run packed rows of an adapter and return the columns of their loss tokens, with gradients."""
        device = self.device
        rows = [{name: values.to(device, non_blocking=True) for name, values in row.items()} for row in rows]
        with autocast(device, self.dtype):
            logprobs, entropies = self._sharded(rows) if self._sharded else packed_logprobs(self.model, rows)
        return loss_tokens(rows, logprobs, entropies)

    def step(
        self, learning_rate: float, clip_norm: float, *, has_loss: bool, completed: Mapping[str, int] | None = None
    ) -> float:
        """Take an optimizer step with the gradients that have added up, and clear them; return their norm.

        Without a finite loss and norm the weights stay as they are. `has_loss`: the loss is finite, and at least one
        token is in it. `completed`: adapters whose own step this is, with its number; None = the run has no adapters.
        """
        return descend(self.optimizer, learning_rate, clip_norm, has_loss=has_loss)

    def weights(self, adapter: str = "") -> Weights:
        """Return the current weights, which the first rank may write; gather them there if they are sharded."""
        if self._sharded is None:
            return WholeWeights(self.model, None, self._tokenizer_dir)
        return self._copied_weights()

    def checkpoint_folders(self) -> Mapping[str, Weights]:
        """Return what engines can load of a checkpoint, by folder: copies in CPU memory, on the first rank."""
        return {"model": self._copied_weights()}

    def state(self) -> Tensors:
        """Return all tensors that training changes, by name; sharded ones stay sharded. They are views, not copies."""
        return parameter_state(dict(self.model.named_parameters()), self.optimizer)

    def load_state(self, names: Collection[str], fill: Callable[[Tensors], None]) -> None:
        """Prepare the tensors of `names`, let `fill` fill them in place, and train on from there."""
        make_moments(dict(self.model.named_parameters()), self.optimizer, names)
        fill(self.state())

    def _copied_weights(self) -> WholeWeights:
        copies = {}
        for name, value in self.model.state_dict().items():
            gathered = whole(value.detach())
            if self._ranks.is_first:
                copies[name] = gathered.to("cpu", copy=True)
        return WholeWeights(self.model, copies, self._tokenizer_dir)


class WholeWeights:
    """Weights by name, or those of the model as they are."""

    adapter = ""

    def __init__(self, model: Any, weights: Tensors | None, tokenizer_dir: Path) -> None:
        self._model = model
        self._weights = weights
        self._tokenizer_dir = tokenizer_dir

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the weights by their names in a folder; tied weights once."""
        weights = self._model.state_dict() if self._weights is None else self._weights
        # transformers fuses layers of some models when it loads them; engines know the names of the folder
        named = revert_weight_conversion(self._model, dict(weights))
        tied = self._model.all_tied_weights_keys
        return {name: tensor for name, tensor in named.items() if name not in tied}

    def save_weights(self, folder: Path) -> None:
        """Write a model folder that engines can load."""
        save_model(self._model, self._tokenizer_dir, folder, self._weights)


def load_policy(folder: Path, options: TrainOptions, ranks: Ranks | None = None) -> Policy:
    """Load the policy of a model folder, sharded over several ranks. Raises `Invalid` as `load_trained_model`."""
    model = load_trained_model(folder, options, ranks)
    return Policy(model, options.learning_rate, options.model, ranks, dtype_of(options))


def load_trained_model(folder: Path, options: TrainOptions, ranks: Ranks | None = None) -> Any:
    """Load a model onto the GPU of this process, if there is one.

    Raises `Invalid` as `load_model` and `liger_kernels`, and for a model that computes packed rows wrong;
    `MissingExtra`.
    """
    device = ranks.device if ranks and ranks.sharded else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    how = options.model_options
    dtype, flash = dtype_of(options), how.attention == "flash"
    if flash and dtype != torch.bfloat16:
        raise Invalid("attention flash needs --dtype bfloat16", name="dtype", value=options.dtype, bound="bfloat16")
    put_kernels = liger_kernels(device) if how.liger else None
    model = load_model(folder, how.attention, device)
    if put_kernels:
        put_kernels(model)
    # Other attention is tested without autocast: in float32 the test is more exact.
    with autocast(device, dtype if flash else torch.float32):
        what = f"model folder {folder} ({type(model).__name__}, attention {how.attention})"
        check_isolation(model, what, "This trainer cannot train it; use another model or attention")
    if how.compile:
        compile_layers(model)
    if how.activation_checkpointing:
        checkpoint_activations(model, how.activation_checkpointing)
    return model


def dtype_of(options: TrainOptions) -> torch.dtype:
    """Return the type in which the layers compute."""
    return torch.bfloat16 if options.dtype == "bfloat16" else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context in which matrix products of the layers are computed in `dtype`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
