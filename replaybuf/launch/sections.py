"""The file of `replaybuf up` as structs: all keys of all sections, with types, bounds, defaults and descriptions.

The keys of a section are the options of its command (`options.py`), without those that follow from other sections, and
a few keys of its own. The structs exist for the check of a file and for its JSON Schema; a file stays a table.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from replaybuf.launch.options import options_of
from replaybuf.launch.supervisor import Restarts
from replaybuf.wire.config import RunConfig

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}(?!\n)$"
"""`$` alone would let a newline at the end pass; JSON Schema does not know `\\Z`."""
FIRST_ENGINE_PORT = 8001
MOST_PARTS = 256
MINE = "mine"
"""Value of `trainer` in a run whose trainer a person starts."""
COMMANDS = {
    "service": "serve",
    "engines": "engine",
    "generator": "generate",
    "trainer": "train",
    "evaluation": "eval",
}
"""Command of each section that starts processes."""
FOLLOWS = {
    "service": {},
    "engines": {"name": "the name in the API is always policy"},
    "generator": {
        "url": "it follows from [service]",
        "run": "it follows from [run]",
        "engine": "name entries of [[engines]] in the key engines",
    },
    "trainer": {
        "url": "it follows from [service]",
        "run": "it follows from [run]",
        "engine": "name entries of [[engines]] in the key engines",
    },
    "evaluation": {
        "url": "it follows from [service]",
        "run": "it follows from [run]",
        "engine": "name entries of [[engines]] in the key engines",
        "json": "the service records the result",
    },
}
"""Options that a section does not have, each with the reason."""
DEFAULTS = {
    ("service", "data_dir"): "service in data_dir of the file",
    ("engines", "port"): "8001 and up, in the order of [[engines]]",
    ("generator", "tokenizer"): "the model of [trainer]",
    ("generator", "metrics_file"): "metrics/NAME.jsonl in data_dir of the file",
    ("trainer", "checkpoint_dir"): "checkpoints in data_dir of the file",
    ("trainer", "weights_dir"): "weights in data_dir of the file",
    ("trainer", "metrics_file"): "metrics/trainer.jsonl in data_dir of the file",
    ("evaluation", "environment"): "the value of the first generator",
    ("evaluation", "tokenizer"): "the value of the first generator",
    ("evaluation", "max_tokens"): "the value of the first generator",
}
"""Defaults that a section has in place of its command's."""

PartName = Annotated[str, Meta(pattern=NAME_PATTERN)]
Seconds = Annotated[float, Meta(gt=0, le=86400.0)]
Words = Annotated[list[str], Meta(min_length=1, max_length=4096)]


class Keys(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the sections: unknown keys are errors."""


class ProcessKeys(Keys, frozen=True):
    """Keys of every section that starts processes."""

    env: Annotated[dict[str, str], Meta(description="More environment variables of the process.")] = {}


class ServiceKeys(ProcessKeys, frozen=True):
    """`replaybuf serve`."""


class EngineKeys(ProcessKeys, frozen=True):
    """An inference engine: `replaybuf engine`, a command of yours (`command` and `url`), or a running one (`url`)."""

    name: Annotated[
        PartName | UnsetType,
        Meta(description="Name of the engine, for other sections and the log. Default: engine-1, engine-2, ..."),
    ] = UNSET
    url: Annotated[
        str | UnsetType,
        Meta(description="Address of the engine: of a running one, or the one at which command listens."),
    ] = UNSET
    command: Annotated[
        Words | UnsetType,
        Meta(description='Command that starts the engine, as a list: ["vllm", "serve", ...]. It needs url.'),
    ] = UNSET


class ClientKeys(ProcessKeys, frozen=True):
    """Keys of sections that use engines."""

    engines: Annotated[
        list[PartName] | UnsetType, Meta(description="Names of the entries of [[engines]] to use. Default: all.")
    ] = UNSET


class GeneratorKeys(ClientKeys, frozen=True):
    """`replaybuf generate`."""

    name: Annotated[
        PartName | UnsetType,
        Meta(description="Name of the generator in the log. Default: generator, or generator-1, generator-2, ..."),
    ] = UNSET


class TrainerKeys(ClientKeys, frozen=True):
    """`replaybuf train`, or a command of yours."""

    command: Annotated[
        Words | UnsetType,
        Meta(
            description="Command that trains in place of `replaybuf train`, as a list. It gets REPLAYBUF_URL and "
            "REPLAYBUF_RUN in its environment, and must resume by itself when it is started again."
        ),
    ] = UNSET


class EvaluationKeys(ClientKeys, frozen=True):
    """`replaybuf eval`, before and after the training."""

    at_start: Annotated[bool, Meta(description="Evaluate before the first step of a new run.")] = True
    at_end: Annotated[bool, Meta(description="Evaluate after the training.")] = True


class RestartKeys(Keys, frozen=True):
    """Bounds for starting a failed process again."""

    most: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Maximum number of restarts of one process in a row. After that everything stops.",
        ),
    ] = 5
    first_pause_s: Annotated[
        Seconds, Meta(description="Pause before the first restart, in seconds; it doubles with every further one.")
    ] = 1.0
    longest_pause_s: Annotated[Seconds, Meta(description="Longest pause before a restart, in seconds.")] = 30.0
    reset_s: Annotated[
        Seconds, Meta(description="A process that has run for this many seconds gets all its restarts back.")
    ] = 60.0

    def bounds(self) -> Restarts:
        """Return what the supervisor takes."""
        return Restarts(**msgspec.structs.asdict(self))


class FileKeys(Keys, frozen=True):
    """One file for a whole run: service, engines, generators, trainer and evaluation."""

    data_dir: Annotated[
        str,
        Meta(
            description="Folder for all data of the run. Relative paths in the file start at the folder of the file. "
            "Default: .replaybuf/up beside the file."
        ),
    ] = ".replaybuf/up"
    start_timeout_s: Annotated[
        Seconds, Meta(description="Maximum time until the service or an engine listens, in seconds.")
    ] = 300.0
    stop_timeout_s: Annotated[
        Seconds,
        Meta(description="Time for trainer, generators and engines to end after a signal, in seconds."),
    ] = 30.0


OWN_KEYS: dict[str, type[ProcessKeys]] = {
    "service": ServiceKeys,
    "engines": EngineKeys,
    "generator": GeneratorKeys,
    "trainer": TrainerKeys,
    "evaluation": EvaluationKeys,
}
"""Keys of each section that are not options of its command."""
RUN_NAME = Annotated[str, Meta(pattern=NAME_PATTERN, description="Name of the run.")]


@functools.cache
def section_of(name: str) -> type[Struct]:
    """Return the struct of one section that starts processes."""
    base = OWN_KEYS[name]
    fields = []
    for key, option in options_of(COMMANDS[name]).items():
        if key in FOLLOWS[name]:
            continue
        field, hint, default = option.field
        if (name, key) in DEFAULTS:
            text = f"{option.help} Default: {DEFAULTS[name, key]}."
            hint, default = Union[Annotated[option.hint, Meta(description=text)], UnsetType], UNSET  # noqa: UP007
        elif option.required and issubclass(base, (GeneratorKeys, EvaluationKeys)):
            hint, default = Annotated[option.hint, Meta(description=option.help)], msgspec.NODEFAULT
        fields.append((field, hint, default))
    return msgspec.defstruct(
        f"{base.__name__.removesuffix('Keys')}Section",
        fields,
        bases=(base,),
        namespace={"__doc__": base.__doc__},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


@functools.cache
def file_shape() -> type[Struct]:
    """Return the struct of the whole file."""
    run = msgspec.defstruct(
        "RunSection",
        [("name", RUN_NAME)],
        bases=(RunConfig,),
        namespace={"__doc__": "Name and configuration of the run, as `PUT /v1/runs/{run}` takes it."},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )
    service, engine, generator, trainer, evaluation = (section_of(name) for name in COMMANDS)
    sections: list[tuple[str, Any, str, Any]] = [
        ("run", run, "Name and configuration of the run.", msgspec.NODEFAULT),
        ("service", service, "Options of the service.", UNSET),
        ("engines", Annotated[list[engine], Meta(max_length=MOST_PARTS)], "Inference engines.", UNSET),  # type: ignore[valid-type]
        (
            "generator",
            Union[generator, Annotated[list[generator], Meta(max_length=MOST_PARTS)]],  # type: ignore[valid-type]  # noqa: UP007
            "Options of the generator. Write [[generator]] for several.",
            UNSET,
        ),
        (
            "trainer",
            Union[Literal["mine"], trainer],  # noqa: UP007
            'Options of the trainer, or trainer = "mine" at the top of the file if you start it.',
            msgspec.NODEFAULT,
        ),
        ("evaluation", evaluation, "Options of the evaluation. Default: no evaluation.", UNSET),
        ("restarts", RestartKeys, "Bounds for starting a failed process again.", RestartKeys()),
    ]
    fields = [
        (
            name,
            Annotated[Union[hint, UnsetType] if default is UNSET else hint, Meta(description=text)],  # noqa: UP007
            default,
        )
        for name, hint, text, default in sections
    ]
    return msgspec.defstruct(
        "RunFile",
        fields,
        bases=(FileKeys,),
        namespace={"__doc__": FileKeys.__doc__},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def file_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, with a description of every key."""
    schema = msgspec.json.schema(file_shape())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
