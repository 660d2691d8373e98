"""LoRA: low-rank adapters on a frozen model, one per adapter of the run, with the layers of peft.

A linear layer with weights W [O, I] computes W x + (alpha / r) B A x (Hu et al. 2021, arXiv:2106.09685, section 4.1),
with A [r, I] and B [O, r]. A starts uniform in +-1/sqrt(I) as in peft, B starts at 0, so version 0 is the base model.
A is a function of seed, adapter and layer, so an adapter starts the same whenever the run adds it.

peft keeps all adapters as modules of one model. Their names become module names there, which may neither have a dot nor
be a method of a module; hence `_slot`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from replaybuf.errors import Invalid, MissingExtra, counted
from replaybuf_trainer.folders import whole_folder
from replaybuf_trainer.losses import LossTokens, Row
from replaybuf_trainer.losses.normalisation import Normalisation
from replaybuf_trainer.models.descent import Tensors, adam, descend, make_moments, parameter_state
from replaybuf_trainer.models.policy import Policy, WholeWeights
from replaybuf_trainer.publishers.publisher import Weights
from replaybuf_trainer.schedules import learning_rate_factor

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Names of tensors in a PEFT folder start with the two modules that peft puts around a model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Rank r and alpha of every adapter, and the ends of the names of its layers; no targets = all of the blocks.

    `learning_rate`, `warm_up_steps`: an adapter that is added late warms up in its own steps. `mean`: what the loss is
    divided by.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    learning_rate: float
    warm_up_steps: int = 0
    mean: Normalisation = "token"
    seed: int = 0


class Adapter:
    """One adapter in training: its parameters by their names in a PEFT folder, and its own AdamW.

    `steps`: own steps done. `loss_tokens`, `rollouts`: of the rows since the last own step, whose gradients have added
    up.
    """

    def __init__(self, slot: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.slot = slot
        self.parameters = parameters
        self.optimizer = adam(parameters.values(), 0.0)  # each step sets its learning rate
        self.steps = 0
        self.loss_tokens = 0
        self.rollouts = 0

    def tensors(self) -> Tensors:
        """Return A and B of all layers by their names in a PEFT folder."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def state(self) -> Tensors:
        """Return A and B, moments, gradients since the last own step, and the counts, int64 [3]."""
        gradients = {
            f"grad.{name}": parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None
        }
        counts = torch.tensor([self.steps, self.loss_tokens, self.rollouts])
        return parameter_state(self.parameters, self.optimizer) | gradients | {"counts": counts}

    def prepare(self, names: Collection[str]) -> None:
        """Make the moments and gradients of `names`, those of a stored `state`."""
        make_moments(self.parameters, self.optimizer, names)
        for name, parameter in self.parameters.items():
            if f"grad.{name}" in names:
                parameter.grad = torch.zeros_like(parameter)

    def set_counts(self, counts: torch.Tensor) -> None:
        """Continue from the counts of a stored `state`."""
        self.steps, self.loss_tokens, self.rollouts = counts.tolist()

    def count(self, rows: Sequence[Row]) -> None:
        """Add the loss tokens and rollouts of rows to those of the next own step."""
        self.loss_tokens += sum(int(row["loss_mask"].sum()) for row in rows)
        self.rollouts += sum(len(row["rewards"]) for row in rows)

    def step(self, learning_rate: float, clip_norm: float, divisor: int, *, has_loss: bool = True) -> float:
        """Take the own step with the gradients so far, divided by `divisor`; return their norm."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= max(1, divisor)
        norm = descend(self.optimizer, learning_rate, clip_norm, has_loss=has_loss)
        self.steps += 1
        self.loss_tokens = self.rollouts = 0
        return norm


class LoraPolicy(Policy):
    """Adapters in training on a frozen model. The adapter of a run without adapters is "".

    It is published merged into the weights, so any engine serves it. The adapters of a run are published as folders.
    """

    def __init__(
        self, model: Any, options: LoraOptions, tokenizer_dir: Path, dtype: torch.dtype = torch.float32
    ) -> None:
        """Freeze the model. Raises `Invalid` for targets that it lacks and a rank above the size of a layer."""
        self.options = options
        self.adapters: dict[str, Adapter] = {}
        self._layers = target_layers(model, options)
        self._tuner: Any = None
        super().__init__(model.requires_grad_(False), 0.0, tokenizer_dir, dtype=dtype)

    def add(self, name: str) -> Adapter:
        """Return the adapter of a name; a new one has its initial weights."""
        if name not in self.adapters:
            slot = _slot(name)
            with torch.random.fork_rng(devices=[]):  # peft draws weights, and they are overwritten
                self._inject(slot)
            self.adapters[name] = Adapter(slot, self._parameters(slot))
            self.load(name, self.initial_weights(name))
        return self.adapters[name]

    def load(self, name: str, tensors: Tensors) -> None:
        """Set the weights of an adapter. Raises `Invalid` for other names or shapes."""
        parameters = self.adapters[name].parameters
        shapes, expected = (
            {key: tuple(tensor.shape) for key, tensor in kind.items()} for kind in (tensors, parameters)
        )
        if differ := sorted(key for key in shapes.keys() | expected.keys() if shapes.get(key) != expected.get(key)):
            key = differ[0]
            detail = f"adapter {name!r}: {key} has shape {shapes.get(key)}; the trainer has {expected.get(key)}"
            raise Invalid(detail, name="adapter", value=name)
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(tensors[key])

    def forward(self, rows: Sequence[Row], adapter: str = "") -> LossTokens:
        """Run packed rows with an adapter and return the columns of their loss tokens, with gradients for it alone."""
        trained = self.add(adapter)
        if self._tuner.active_adapter != trained.slot:
            self._tuner.set_adapter(trained.slot)
        trained.count(rows)
        return super().forward(rows)

    def initial_weights(self, name: str) -> Tensors:
        """Return A and B of version 0. Reads nothing that training changes, so any thread may call it."""
        rank, tensors = self.options.rank, {}
        for layer, (outputs, inputs) in self._layers.items():
            key = hashlib.blake2b(f"{self.options.seed}/{name}/{layer}".encode(), digest_size=7).digest()
            random = torch.Generator().manual_seed(int.from_bytes(key, "big"))
            uniform = torch.rand((rank, inputs), generator=random)
            tensors[_key(layer, "A")] = (2 * uniform - 1) / math.sqrt(inputs)
            tensors[_key(layer, "B")] = torch.zeros(outputs, rank)
        return tensors

    def own_steps(self, step: int) -> Mapping[str, int]:
        """Return the own steps done of each adapter that has trained; all are those of "" in a run without adapters."""
        return {name: adapter.steps if name else step for name, adapter in self.adapters.items()}

    def step(
        self, learning_rate: float, clip_norm: float, *, has_loss: bool, completed: Mapping[str, int] | None = None
    ) -> float:
        """Take the own steps of `completed`; the others keep their gradients. Return the largest norm.

        The loss of a run without adapters is divided by the totals of its batch already. Raises `Invalid` for an own
        step that is not the next one.
        """
        if completed is None:
            return self.add("").step(learning_rate, clip_norm, 1, has_loss=has_loss)
        norms = [self._own_step(name, step, learning_rate, clip_norm) for name, step in sorted(completed.items())]
        return next((norm for norm in norms if not math.isfinite(norm)), max(norms, default=0.0))

    def _own_step(self, name: str, step: int, learning_rate: float, clip_norm: float) -> float:
        adapter, options = self.add(name), self.options
        if step != adapter.steps:
            raise Invalid(
                f"the batch completes step {step} of adapter {name!r}; the checkpoint has "
                f"{counted(adapter.steps, 'step')} of it; use the --checkpoint-dir of this run",
                name="adapters_completed",
                value=step,
                bound=adapter.steps,
            )
        warm_up = learning_rate_factor("constant", adapter.steps, options.warm_up_steps, None)
        divisor = adapter.loss_tokens if options.mean == "token" else adapter.rollouts
        rate = min(learning_rate, warm_up * options.learning_rate)
        return adapter.step(rate, clip_norm, divisor, has_loss=adapter.loss_tokens > 0)

    def weights(self, adapter: str = "") -> Weights:
        """Return a PEFT folder for an adapter of the run, and for "" the model with the adapter merged into it.

        Any thread may ask for an adapter that has not trained yet.
        """
        if not adapter:
            return WholeWeights(self.model, self.merged_weights(""), self._tokenizer_dir)
        trained = self.adapters.get(adapter)
        return AdapterWeights(adapter, trained.tensors() if trained else self.initial_weights(adapter), self._config())

    def checkpoint_folders(self) -> Mapping[str, Weights]:
        """Return a PEFT folder for each adapter of the run, and the merged model of a run without adapters."""
        folders: dict[str, Weights] = {
            f"adapters/{name}": AdapterWeights(
                name, {k: v.clone() for k, v in adapter.tensors().items()}, self._config()
            )
            for name, adapter in self.adapters.items()
            if name
        }
        return folders | {"model": self.weights()} if "" in self.adapters else folders

    def state(self) -> Tensors:
        """Return the state of each adapter, by its name, a slash and the names of `Adapter.state`."""
        return {
            f"{name}/{key}": value for name, adapter in self.adapters.items() for key, value in adapter.state().items()
        }

    def load_state(self, names: Collection[str], fill: Callable[[Tensors], None]) -> None:
        """Add the adapters of `names` and let `fill` fill their tensors in place."""
        for adapter in sorted({name.rpartition("/")[0] for name in names if "/" in name}):
            own = {name.rpartition("/")[2] for name in names if name.startswith(f"{adapter}/")}
            self.add(adapter).prepare(own)
        tensors = self.state()
        fill(tensors)
        for name, named in self.adapters.items():
            named.set_counts(tensors[f"{name}/counts"])

    @torch.no_grad()
    def merged_weights(self, name: str) -> Tensors:
        """Return W + (alpha / r) B A by the parameters' names in the base model; the model itself stays as it is."""
        slot = self.add(name).slot
        weights = {key.replace(".base_layer.", "."): value for key, value in self.model.state_dict().items()}
        for layer in self._layers:
            module = self.model.get_submodule(layer)
            weights[f"{layer}.weight"] = module.base_layer.weight + module.get_delta_weight(slot)
        return {key: value for key, value in weights.items() if ".lora_" not in key}

    def _inject(self, slot: str) -> None:
        if self._tuner is None:
            self._tuner = _peft().LoraModel(self.model, self._config(), slot)
        else:
            self._tuner.peft_config[slot] = self._config()
            self._tuner.inject_adapter(self.model, slot)

    def _parameters(self, slot: str) -> dict[str, torch.nn.Parameter]:
        parameters: dict[str, torch.nn.Parameter] = {}
        for layer in self._layers:
            module = self.model.get_submodule(layer)
            parameters |= {_key(layer, "A"): module.lora_A[slot].weight, _key(layer, "B"): module.lora_B[slot].weight}
        return parameters

    def _config(self) -> Any:
        """Return the configuration in which peft keeps an adapter."""
        options = self.options
        ends = sorted({layer.rpartition(".")[2] for layer in self._layers})
        return _peft().LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            target_modules=list(options.targets) or ends,
            base_model_name_or_path=str(self._tokenizer_dir),
        )


class AdapterWeights:
    """A and B of an adapter by their names in a PEFT folder."""

    def __init__(self, adapter: str, tensors: Tensors, config: Any) -> None:
        self.adapter = adapter
        self._tensors = tensors
        self._config = config

    def tensors(self) -> Tensors:
        """Return A and B by their names in a PEFT folder."""
        return self._tensors

    def save_weights(self, folder: Path) -> None:
        """Write a PEFT folder, which engines load by name; it appears complete or not at all."""
        with whole_folder(folder) as scratch:
            dataclasses.replace(self._config, inference_mode=True).save_pretrained(scratch)
            save_file({key: tensor.contiguous() for key, tensor in self._tensors.items()}, scratch / TENSORS_FILE)


def target_layers(model: Any, options: LoraOptions) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the linear layers that get adapters, by name; the output layer has none.

    Raises `Invalid` if a target fits no layer, and if the rank is above the smaller side of a layer.
    """
    head = model.get_output_embeddings()
    linear = {
        name: (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
    }
    for target in options.targets:
        if not any(_ends(name, [target]) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            layers = f"the linear layers of the model are {', '.join(known) or 'none'}"
            detail = f"targets of --lora-options has {target!r}; {layers}"
            raise Invalid(detail, name="targets", value=target, bound=known)
    targets = {name: size for name, size in linear.items() if not options.targets or _ends(name, options.targets)}
    smallest = min(targets, key=lambda name: min(targets[name]))
    if options.rank > min(targets[smallest]):
        detail = f"--lora-rank is {options.rank}; layer {smallest} is {targets[smallest]}, so the maximum is "
        raise Invalid(
            f"{detail}{min(targets[smallest])}; leave such layers out with targets of --lora-options",
            name="lora_rank",
            value=options.rank,
            bound=min(targets[smallest]),
        )
    return targets


def _ends(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _key(layer: str, matrix: str) -> str:
    return f"{_PREFIX}{layer}.lora_{matrix}.weight"


def _slot(name: str) -> str:
    return f"adapter-{name.replace('.', ':')}"


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise MissingExtra("replaybuf train --lora-rank", "lora") from None
    return peft
