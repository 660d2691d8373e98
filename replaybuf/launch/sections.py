"""The file of `replaybuf up` as structs: all keys of all sections, with types, bounds, defaults and descriptions.

The keys of a section that starts processes are the options of its command, read from the command itself
(`options.py`), without those that follow from other sections, and the fields of its struct.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from replaybuf.kernel.strategy.options import meaning_of
from replaybuf.launch.options import options_of
from replaybuf.launch.supervisor import Restarts, Seconds
from replaybuf.wire.config import RunConfig

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}(?!\n)$"
"""`$` alone would let a newline at the end pass; JSON Schema does not know `\\Z`."""
FIRST_ENGINE_PORT = 8001
MOST_PARTS = 256
MINE: Literal["mine"] = "mine"
"""Value of `trainer` in a run whose trainer a person starts."""
FOLLOWS = {
    "url": "it follows from [service]",
    "run": "it follows from [run]",
    "engine": "name entries of [[engines]] in the key engines",
}
"""Options that a section with engines does not have, each with the reason."""

PartName = Annotated[str, Meta(pattern=NAME_PATTERN)]
Words = Annotated[list[str], Meta(min_length=1, max_length=4096)]


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of a table. `secret`: no message shows its value."""

    hint: Any
    description: str
    required: bool
    secret: bool = False


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A section that starts processes. `options`: values for its command, as the file has them.

    Of the class: `subcommand`; `follows`: options that the section does not have, each with the reason; `defaults`: in
    place of those of the command; `needs_options`: the required options are required in the file.
    """

    subcommand: ClassVar[str]
    follows: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Mapping[str, str]] = {}
    needs_options: ClassVar[bool] = False

    options: dict[str, Any] = {}
    env: Annotated[dict[str, str], Meta(description="More environment variables of the process.")] = {}


class ServiceSection(Section, frozen=True):
    """`replaybuf serve`."""

    subcommand = "serve"
    defaults = {"data_dir": "service in data_dir of the file"}


class EngineSection(Section, frozen=True):
    """An inference engine: `replaybuf engine`, a command of yours (`command` and `url`), or a running one (`url`)."""

    subcommand = "engine"
    follows = {"name": "the name in the API is always policy"}
    defaults = {"port": "8001 and up, in the order of [[engines]]"}

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


class ClientSection(Section, frozen=True):
    """A section whose command uses engines."""

    follows = FOLLOWS

    engines: Annotated[
        list[PartName] | UnsetType, Meta(description="Names of the entries of [[engines]] to use. Default: all.")
    ] = UNSET


class GeneratorSection(ClientSection, frozen=True):
    """`replaybuf generate`."""

    subcommand = "generate"
    defaults = {"tokenizer": "the model of [trainer]", "metrics_file": "metrics/NAME.jsonl in data_dir of the file"}
    needs_options = True

    name: Annotated[
        PartName | UnsetType,
        Meta(description="Name of the generator in the log. Default: generator, or generator-1, generator-2, ..."),
    ] = UNSET


class TrainerSection(ClientSection, frozen=True):
    """`replaybuf train`, or a command of yours."""

    subcommand = "train"
    defaults = {
        "checkpoint_dir": "checkpoints in data_dir of the file",
        "weights_dir": "weights in data_dir of the file",
        "metrics_file": "metrics/trainer.jsonl in data_dir of the file",
    }

    command: Annotated[
        Words | UnsetType,
        Meta(
            description="Command that trains in place of `replaybuf train`, as a list. It gets REPLAYBUF_URL and "
            "REPLAYBUF_RUN in its environment, and must resume by itself when it is started again."
        ),
    ] = UNSET


class EvaluationSection(ClientSection, frozen=True):
    """`replaybuf eval`, before and after the training."""

    subcommand = "eval"
    follows = FOLLOWS | {"json": "the service records the result"}
    defaults = dict.fromkeys(("environment", "tokenizer", "max_tokens"), "the value of the first generator")
    needs_options = True

    at_start: Annotated[bool, Meta(description="Evaluate before the first step of a new run.")] = True
    at_end: Annotated[bool, Meta(description="Evaluate after the training.")] = True


class RunSection(RunConfig, frozen=True, kw_only=True):
    """Name and configuration of the run, as `PUT /v1/runs/{run}` takes it."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN, description="Name of the run.")]

    @property
    def config(self) -> RunConfig:
        """Configuration without the name."""
        return RunConfig(**{field: getattr(self, field) for field in RunConfig.__struct_fields__})


class RunFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        Seconds, Meta(description="Time for trainer, generators and engines to end after a signal, in seconds.")
    ] = 30.0
    run: Annotated[RunSection, Meta(description="Name and configuration of the run.")]
    service: Annotated[ServiceSection, Meta(description="Options of the service.")] = ServiceSection()
    engines: Annotated[list[EngineSection], Meta(max_length=MOST_PARTS, description="Inference engines.")] = []
    generator: Annotated[
        GeneratorSection | Annotated[list[GeneratorSection], Meta(max_length=MOST_PARTS)],
        Meta(description="Options of the generator. Write [[generator]] for several."),
    ] = []
    trainer: Annotated[
        Literal["mine"] | TrainerSection,
        Meta(description='Options of the trainer, or trainer = "mine" at the top of the file if you start it.'),
    ]
    evaluation: Annotated[
        EvaluationSection | UnsetType, Meta(description="Options of the evaluation. Default: no evaluation.")
    ] = UNSET
    restarts: Annotated[Restarts, Meta(description="Bounds for starting a failed process again.")] = Restarts()

    @property
    def engine_names(self) -> list[str]:
        """Names of the engines in their order."""
        return [engine.name or f"engine-{place}" for place, engine in enumerate(self.engines, 1)]

    @property
    def generators(self) -> dict[str, GeneratorSection]:
        """Generators by their place in the file."""
        sections = self.generator if isinstance(self.generator, list) else [self.generator]
        if len(sections) == 1:
            return {"generator": sections[0]}
        return {f"generator[{place}]": section for place, section in enumerate(sections, 1)}

    @property
    def trained_model(self) -> dict[str, Any]:
        """Option `tokenizer` of the other sections: the model of the trainer, where that is in the file."""
        options = {} if self.trainer == MINE else self.trainer.options
        return {"tokenizer": options["model"]} if "model" in options else {}


SECTIONS = (ServiceSection, EngineSection, GeneratorSection, TrainerSection, EvaluationSection)


@functools.cache
def keys_of(shape: type[Struct]) -> Mapping[str, Key]:
    """Return the keys of a table: the fields of its struct, and the options of the command of a section."""
    fields = {
        field.name: Key(field.type, meaning_of(field.type) or "it has no default", field.required)
        for field in _fields(shape)
    }
    return _option_keys(shape) | fields if issubclass(shape, Section) else fields


def _option_keys(shape: type[Section]) -> dict[str, Key]:
    return {
        key: Key(
            option.hint,
            f"{option.help} Default: {shape.defaults[key]}." if key in shape.defaults else option.help,
            option.required and shape.needs_options and key not in shape.defaults,
            option.secret,
        )
        for key, option in options_of(shape.subcommand).items()
        if key not in shape.follows
    }


def _fields(shape: type[Struct]) -> list[msgspec.structs.FieldInfo]:
    hidden = {"options"} if issubclass(shape, Section) else set()
    return [field for field in msgspec.structs.fields(shape) if field.name not in hidden]


def file_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, with a description of every key."""
    schema = msgspec.json.schema(RunFile)
    for shape in SECTIONS:
        definition = schema["$defs"][shape.__name__]
        del definition["properties"]["options"]
        keys = _option_keys(shape)
        properties = {key: _key_schema(shape, key, text) for key, text in keys.items()}
        for property_ in properties.values():
            schema["$defs"] |= property_.pop("$defs", {})
        definition["properties"] |= properties
        definition["required"] = [key for key in keys if keys[key].required]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _key_schema(shape: type[Section], key: str, option: Key) -> dict[str, Any]:
    default = options_of(shape.subcommand)[key].default
    shown = key not in shape.defaults and isinstance(default, (bool, int, float, str)) and default != ""
    schema = msgspec.json.schema(Annotated[option.hint, Meta(description=option.description)])
    return schema | ({"default": default} if shown else {})
