"""The file of the demo's run, `DATA/run.toml`: what `replaybuf up` reads, and all hyperparameters of the demo."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from safetensors import safe_open

from replaybuf.errors import Invalid
from replaybuf.files import MODEL_FILE_BYTES, read_bounded
from replaybuf.kernel.strategy.plugin_set import resolve_config
from replaybuf.lab.demo.folder import CHARACTERS, PROMPTS, Folder, Request
from replaybuf.launch.file import decode_file, read_file
from replaybuf.launch.machine import port_problems
from replaybuf.launch.options import options_of
from replaybuf.launch.plan import QUIET, Plan
from replaybuf.launch.planning import Planner
from replaybuf.launch.supervisor import Program

RUN = "demo"
TASK = "spell_backward"
ENVIRONMENT = "reasoning-gym"
TARGET_ACCURACY = 0.25
GROUP_SIZE = 8
GROUPS_PER_BATCH = 32
SEQ_LEN = 128
MAX_NEW_TOKENS = 8
LEARNING_RATE = 1e-4
LONG_POLL_MS = 1000
"""Long-poll of the trainer: a step of the demo is shorter than a polling pause."""

TRAINER_OPTIONS = (
    "loss",
    "learning_rate",
    "warm_up_steps",
    "schedule",
    "clip_norm",
    "dtype",
)
GENERATOR_OPTIONS = ("environment", "temperature", "max_tokens", "seed_requests")
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # each process needs one core; more threads only compete
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # glibc reuses buffers of some MB instead of returning them to the system and requesting them again each time.
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "268435456",
    "MALLOC_TOP_PAD_": "16777216",
}

FILE = Template("""\
# The run of `replaybuf demo`, in the form that `replaybuf up` reads. To start a run of your own, copy this file and the
# folder model/, and change the file. `replaybuf config schema` prints all keys.

data_dir = "."                       # everything that the run writes
stop_timeout_s = 2

[run]
name = $run
group_size = $group_size                       # completions per problem
max_steps = $steps
seed = $seed
advantage = "grpo"
batch = { groups_per_batch = $groups, tokens_per_batch = $tokens, seq_len = $seq_len }
strategy = { name = $strategy, options = $options }
tickets = { ttl_s = 20, max_attempts = 10 }   # many times the time of a group$run_options

[service]
port = 0                             # a free port
tokenizer = $characters
env = $env

[[engines]]
name = "engine"
port = 0
model = $model
threads = 1
env = $env

[generator]
environment = $environment
prompts = $prompts
max_tokens = $max_tokens
seed_requests = true
report_every_s = 1.0
env = $env

[trainer]
model = $model
checkpoint_every_steps = $checkpoint_every_steps
keep_checkpoints = $keep_checkpoints
learning_rate = $learning_rate
reader_options = { wait_ms = $wait_ms }
seed = $seed
env = $env$trainer_options

[restarts]                           # of a process that dies
most = 3
first_pause_s = 0.2
""")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the run of a study may have otherwise than the demo.

    `model`: folder with the model and its problems; `run_options`, `trainer_options`: more keys of these sections.
    """

    model: str = "model"
    environment: str = ENVIRONMENT
    groups_per_batch: int = GROUPS_PER_BATCH
    learning_rate: float = LEARNING_RATE
    checkpoint_every_steps: int = 20
    keep_checkpoints: int = 2
    run_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


DEMO = Settings()


def write_run_file(folder: Folder, request: Request) -> None:
    """Write the file of a new demo. Raises `Invalid` for options that a file cannot hold."""
    folder.run_file.write_text(run_text(request))


def check_request(request: Request) -> None:
    """Raise `Invalid` for a strategy that is not installed, and for options out of bounds or for another batch."""
    resolve_config(decode_file(tomllib.loads(run_text(request))).sections.run.config)


def run_text(request: Request, settings: Settings = DEMO) -> str:
    """Return the file of a run. Raises `Invalid` for options that a file cannot hold."""
    values = {
        "run": RUN,
        "seed": request.seed,
        "steps": request.steps,
        "group_size": GROUP_SIZE,
        "groups": settings.groups_per_batch,
        "tokens": settings.groups_per_batch * GROUP_SIZE * SEQ_LEN,
        "seq_len": SEQ_LEN,
        "strategy": request.strategy,
        "options": request.strategy_options,
        "environment": settings.environment,
        "model": settings.model,
        "prompts": f"{settings.model}/{PROMPTS}",
        "max_tokens": MAX_NEW_TOKENS,
        "checkpoint_every_steps": settings.checkpoint_every_steps,
        "keep_checkpoints": settings.keep_checkpoints,
        "learning_rate": settings.learning_rate,
        "wait_ms": LONG_POLL_MS,
        "characters": str(CHARACTERS),
        "env": CHILD_ENVIRONMENT,
    }
    more = {"run_options": settings.run_options, "trainer_options": settings.trainer_options}
    lines = {
        section: "".join(f"\n{inline_toml(name)} = {inline_toml(value)}" for name, value in options.items())
        for section, options in more.items()
    }
    return FILE.substitute({name: inline_toml(value) for name, value in values.items()}, **lines)


def warm_start_program(
    words: Sequence[str], model: Path, seed: int, target_accuracy: float, task: str = TASK
) -> Program:
    """Return the program that makes the initial model with its problems. `words`: run a command of replaybuf."""
    options = ["--task", task, "--seed", str(seed), "--target-accuracy", str(target_accuracy)]
    return Program(
        name="init-model",
        command=[*words, "init-model", "--out", str(model), *options],
        environment={**QUIET, **CHILD_ENVIRONMENT},
        may_finish=True,
    )


def read_plan(folder: Folder, port: int | None, program: Sequence[str]) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of the run file, and its tables. `port`: of the service, in place of the file's.

    The plan may name the model before it exists. Raises `Invalid` with all problems of the file, a port in use among
    them.
    """
    tables = read_file(folder.run_file)
    if port is not None:
        tables["service"] = {**tables.get("service", {}), "port": port}
    planner = Planner(tables, folder.root, program=program, made_later=folder.root.resolve() / folder.model.name)
    plan = planner.plan()
    problems = [*planner.problems, *port_problems(planner.addresses)]
    if plan is None or problems:
        detail = f"{folder.run_file} cannot be used: {'; '.join(problems)}"
        raise Invalid(detail, name="--data-dir", value=str(folder.root))
    return plan, tables


def list_hyperparameters(folder: Folder) -> dict[str, dict[str, Any]]:
    """Return what a reader needs to repeat the run, by part: values of the file, and defaults that matter."""
    tables = read_file(folder.run_file)
    run, generator, trainer = tables["run"], tables["generator"], tables["trainer"]
    strategy, batch = run.get("strategy", {}), run["batch"]
    return {
        "model": {"task": TASK, **_model_shape(folder), "warm start to sampled accuracy": TARGET_ACCURACY},
        "run": {
            "strategy": strategy.get("name"),
            **strategy.get("options", {}),
            "advantage": run.get("advantage"),
            "group_size": run.get("group_size"),
            **batch,
            "max_steps": run.get("max_steps"),
            "seed": run.get("seed"),
        },
        "trainer": {name: trainer.get(name, options_of("train")[name].default) for name in TRAINER_OPTIONS},
        "generator": {name: generator.get(name, options_of("generate")[name].default) for name in GENERATOR_OPTIONS},
    }


def _model_shape(folder: Folder) -> dict[str, Any]:
    """Return architecture and number of parameters of the model; nothing if its files do not tell."""
    config, weights = folder.model / "config.json", folder.model / "model.safetensors"
    if not (config.is_file() and weights.is_file()):
        return {}
    with safe_open(weights, framework="numpy") as tensors:
        count = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return {
        "architecture": msgspec.json.decode(read_bounded(config, MODEL_FILE_BYTES)).get("model_type"),
        "parameters": count,
    }


def inline_toml(value: Any) -> str:
    """Write a value of JSON as TOML on one line. Raises `Invalid` for null, which TOML lacks."""
    if value is None:
        detail = "an option of the strategy is null, which the file of a run cannot hold; leave it out for its default"
        raise Invalid(detail, name="strategy_options", value=None)
    if isinstance(value, dict):
        pairs = [f"{inline_toml(name)} = {inline_toml(item)}" for name, item in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline_toml, value))}]"
    return msgspec.json.encode(value).decode()  # strings, numbers and booleans are the same in both
