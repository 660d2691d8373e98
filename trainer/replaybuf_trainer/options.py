"""Options of this package's commands. The docstring of each field is its help text; torch is not imported here."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter, validators
from cyclopts.types import NonNegativeFloat, NonNegativeInt, NormFloat, Port, PositiveFloat, PositiveInt

from replaybuf.option_types import ListenAddress, json_option
from replaybuf_trainer.option_groups import (
    AdapterOptions,
    FakeShapes,
    HeldOutOptions,
    ModelOptions,
    ReaderOptions,
    TablesOptions,
)

OnPublish: TypeAlias = Literal["drain", "in-flight", "abort-and-resume", "abort"]
"""How engines pause while they load weights; `replaybuf generate --on-publish` has the same values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitModelOptions:
    """Task and strength of a warm-started model."""

    out: Path
    """Model folder to create."""
    task: Literal["spell_backward", "chain_sum"] = "spell_backward"
    """Task from reasoning-gym: words to spell backwards, or sums and differences of two numbers below 100."""
    seed: NonNegativeInt = 0
    """Seed of the weights, the problems and their order."""
    target_accuracy: NormFloat = 0.25
    """Accuracy at which the supervised warm start ends, from 0 to 1, measured with sampling."""
    threads: PositiveInt = 1
    """Number of torch threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Model and address of an engine."""

    model: Path
    """Model folder."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8001
    """Port to listen on; 0 takes a free port."""
    threads: PositiveInt = 1
    """Number of torch threads."""
    max_rows: PositiveInt = 512
    """Maximum number of completions sampled at the same time."""
    name: str = "policy"
    """Name of the base model in the API."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchWeightsOptions:
    """Engine, folder, and where versions come from."""

    engine: str
    """Address of the engine beside this helper."""
    folder: Path = Path(".replaybuf/fetched-weights")
    """Folder of the copies, which the engine must be able to read. Helpers of one machine may share it."""
    keep: PositiveInt = 2
    """Number of newest versions to keep, beside the one that each helper got last; the disk needs room for one more."""
    host: str = "127.0.0.1"
    """Address to listen on for a trainer; without --publish-token it must be a loopback address."""
    port: Port = 8911
    """Port to listen on for a trainer; 0 takes a free port."""
    publish_token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token of the trainer's option --publish-token."""
    tls_cert: Path | None = None
    """Certificate chain (PEM): listen with TLS for a trainer. A renewed file is read again."""
    tls_key: Path | None = None
    """Key of the certificate (PEM), without a password."""
    tls_ca: Path | None = None
    """Certificates (PEM) of authorities to trust for weights at https addresses. Default: those of the system."""
    engine_timeout_s: PositiveFloat = 60.0
    """Maximum time of one request to the engine, in seconds."""
    run: Annotated[str, Parameter(show=False)] = ""
    """Name of a run whose published version the helper loads by itself. Without it, a trainer decides what to load."""
    url: str = "http://127.0.0.1:8900"
    """Address of the service, for a RUN; separate several servers of one Redis by commas."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token with the role producer, for a RUN."""
    adapter: str = ""
    """Adapter of the run that the engine serves, for a RUN; by default a whole model."""
    on_publish: OnPublish = "in-flight"
    """Running completions while the engine loads weights, for a RUN; give generators the same value."""


CHECKPOINTS = Path(".replaybuf/checkpoints")
"""Default folder of the checkpoints of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Run, folders and hyperparameters of a trainer."""

    url: str = "http://127.0.0.1:8900"
    """Address of the service; separate several servers of one Redis by commas."""
    run: Annotated[str, Parameter(show=False)] = ""
    """Name of the run. Without it, batches come from --from-export or --fake-data."""
    fake_data: Annotated[bool, Parameter(negative="")] = False
    """Train on made-up batches, without a service: to try, debug and profile a trainer. Give --steps."""
    fake_shapes: FakeShapes = dataclasses.field(default_factory=FakeShapes)
    from_export: Path | None = None
    """Folder of replaybuf export: train on its recorded steps, without a service."""
    model: Path
    """Model folder with the initial weights. Its tokenizer is copied to checkpoints and published weights."""
    engines: Annotated[
        tuple[str, ...], Parameter(name="--engine", consume_multiple=True, negative="", show_default=False)
    ] = ()
    """Address of an engine to load weights into; give several to load all. Without it, your engines must load the
    weights from the published weights_uri."""
    checkpoint_dir: Path = CHECKPOINTS
    """Folder of the checkpoints. With --fake-data or --from-export there are none in the default folder."""
    weights_dir: Path = Path(".replaybuf/weights")
    """Folder of the published weights; the engines must be able to read it."""
    checkpoint_every_steps: PositiveInt = 20
    """Steps between two checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    on_resume: Literal["redeliver", "resample"] = "redeliver"
    """Batches after the checkpoint. redeliver: the service sends the same batches again; resample: it selects new
    ones."""
    reader_options: ReaderOptions = dataclasses.field(default_factory=ReaderOptions)
    eval_from: Path | None = None
    """Folder of replaybuf export with held-out groups: their loss, KLs and entropy are figures eval_... of a step."""
    eval_options: HeldOutOptions = dataclasses.field(default_factory=HeldOutOptions)
    learning_rate: PositiveFloat = 1e-4
    """Learning rate of AdamW after the warm-up."""
    warm_up_steps: NonNegativeInt = 10
    """Steps in which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up. wsd: constant, and in the last fifth 1 - sqrt of the share that is done. All but
    constant end at 0 after the last step."""
    steps: PositiveInt | None = None
    """Step after which the training ends, and the length of the schedule. The default is max_steps of the run."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient is not finite. stop: the training ends before the ack; skip: the weights stay as
    they are and the next step follows."""
    clip_norm: PositiveFloat = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down."""
    loss: str = "grpo"
    """Policy loss: cispo, clip-cov, decoupled-ppo, dr-grpo, grpo, gspo, kl-cov, truncated-ratio, or a plug-in."""
    loss_options: Annotated[
        dict[str, Any],
        json_option(
            'Options of the loss, such as {"clip_high": 0.28}. The keys correction, reference and entropy add a '
            "mismatch correction, a penalty to a reference and an entropy bonus to any loss; normalise_constant is the "
            "divisor of --normalise constant, such as the maximum number of completion tokens."
        ),
    ] = dataclasses.field(default_factory=dict)
    normalise: Literal["token", "sequence", "constant"] | None = None
    """Mean of the loss. token: every loss token counts the same; sequence: every rollout does; constant: sum divided by
    rollouts and normalise_constant of --loss-options. The default is that of the loss."""
    model_options: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the layers compute. Weights, gradients, logprobs and loss are float32 in both."""
    fsdp: bool = False
    """Shard weights, gradients and moments over the processes of torchrun; each trains its own part of every batch."""
    rank_timeout_s: PositiveFloat = 1800.0
    """Seconds that a process of torchrun waits for the others before it fails."""
    lora_rank: PositiveInt | None = None
    """Train LoRA adapters of this rank on the frozen model, one per adapter of the run. In a run without adapters it is
    one adapter, published merged into the weights."""
    lora_options: AdapterOptions = dataclasses.field(default_factory=AdapterOptions)
    epochs_per_batch: PositiveInt = 1
    """Optimizer steps on each batch, every one over all its rows. The batch is acked and its version published once,
    after the last. Proximal logprobs that the loss needs and no generator sent are computed once, before the first. Not
    with the adapters of a run."""
    rows_per_forward: PositiveInt = 8
    """Number of packed rows in one forward pass."""
    threads: PositiveInt = 1
    """Number of torch threads."""
    seed: NonNegativeInt = 0
    """Seed of torch."""
    metrics_file: Path | None = None
    """File to append one JSON line per step to."""
    metrics_address: ListenAddress | None = None
    """Address of GET /metrics for Prometheus: HOST:PORT, or PORT on 127.0.0.1; port 0 takes a free one and logs it.
    Default: no metrics."""
    push_metrics: str | None = dataclasses.field(default=None, repr=False)
    """Server to push the metrics to: http://HOST:PORT of a Prometheus Pushgateway, otlp+http://HOST:4318 of an
    OpenTelemetry collector."""
    push_metrics_every_s: PositiveFloat = 15.0
    """Time between two pushes, in seconds."""
    tensorboard: Path | None = None
    """Folder to write the figures of each step to for TensorBoard."""
    wandb: str | None = None
    """Project of Weights & Biases to log the figures of each step to; WANDB_MODE=offline needs no network."""
    tables: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=256))] = 0
    """Number of rollouts per step to write with a value for every token, as Parquet and as an HTML page."""
    tables_options: TablesOptions = dataclasses.field(default_factory=TablesOptions)
    token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token with the role trainer."""
    service_timeout_s: NonNegativeFloat = 60.0
    """Seconds that the service may be unreachable before the trainer fails."""
    engine_timeout_s: PositiveFloat = 60.0
    """Maximum time of one request to load weights, in seconds. With drain it includes the time to finish
    completions."""
    publisher: str | None = None
    """How weights reach the engines: folder (engines load them from weights_uri), reload (each engine reads the
    folder), http (each engine's helper downloads the folder), nccl (each engine gets tensors, by vLLM's weight
    transfer), none, or a plug-in. The default is reload with
    --engine, none without --run, else folder."""
    publisher_options: Annotated[
        dict[str, Any],
        json_option(
            'Options of the publisher, such as {"host": "10.0.0.2"} of http.\n'
            "http: host, port, url, tls_cert, tls_key, tls_ca, shard_bytes\n"
            "nccl: backend, host, dtype, buffer_bytes"
        ),
    ] = dataclasses.field(default_factory=dict)
    publish_token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token between the publisher http and the helpers of engines."""
    on_publish: OnPublish = "in-flight"
    """Running completions while an engine loads weights. drain: the engine finishes them first; in-flight: it pauses
    them; abort-and-resume, abort: it aborts them. Give the generators the same value."""

    def check(self) -> None:
        """Raise `Invalid` for an unknown loss or option of it, before `replaybuf up` starts anything.

        Losses need torch, which takes seconds to import: not for the default, which is right.
        """
        loss = (self.loss, self.loss_options, self.normalise)
        if loss != (TrainOptions.loss, {}, None) and find_spec("torch") is not None:
            from replaybuf_trainer.losses import load_objective

            load_objective(*loss)

    @property
    def offline(self) -> bool:
        """Whether batches come without a service."""
        return self.fake_data or self.from_export is not None

    @property
    def source(self) -> str:
        """Name of what is trained on; a checkpoint keeps it."""
        if self.fake_data:
            return "fake-data"
        return self.run or f"export {self.from_export}"

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether there are checkpoints: the default folder is for those of runs."""
        return not self.offline or self.checkpoint_dir != CHECKPOINTS
