"""The check of a file: every problem is found before anything starts, each in one line with its way out."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from replaybuf.errors import Invalid
from replaybuf.launch.file import decode_file, read_file
from replaybuf.launch.machine import port_problems
from replaybuf.launch.planning import Planner
from replaybuf.launch.sections import file_schema

EXAMPLE = Path(__file__).parents[2] / "examples" / "run.toml"
RUN = {"name": "r", "batch": {"groups_per_batch": 2}}
GENERATOR = {"environment": "exact-match", "prompts": "module:prompts", "max_tokens": 4, "tokenizer": "."}
MINIMAL: dict[str, Any] = {
    "run": RUN,
    "trainer": "mine",
    "engines": [{"name": "small", "url": "http://127.0.0.1:1"}, {"name": "large", "url": "http://127.0.0.1:2"}],
    "generator": GENERATOR,
}


def problems(folder: Path, **sections: Any) -> list[str]:
    """Return the problems of a small correct file with other sections; None removes one."""
    tables = {name: table for name, table in (MINIMAL | sections).items() if table is not None}
    planner = Planner(tables, folder)
    assert (planner.plan() is None) == bool(planner.problems)
    return planner.problems


def test_a_small_file_has_no_problems(tmp_path: Path) -> None:
    assert problems(tmp_path) == []


def test_all_problems_of_single_keys_are_listed_with_the_nearest_key() -> None:
    """Wrong names, types and bounds, missing keys, and keys that follow from other sections; secrets stay hidden."""
    tables = tomllib.loads("""
        dat_dir = "x"
        start_timeout_s = "soon"
        [run]
        name = "Bad Name"
        groupsize = 3
        batch = { seq_len = 1, tokens_per_batch = { per_rnk = 3 } }
        filters = [{ nam = "x" }]
        [service]
        port = "8900"
        redis_url = 3
        [[engines]]
        modle = "x"
        [[generator]]
        url = "http://x"
        environment = "e"
        max-tokens = 3
    """)
    assert decode_file(tables).problems == [
        "dat_dir is not a key of this file; did you mean data_dir?",
        "start_timeout_s is 'soon': expected `float`, got `str`",
        "run.name is 'Bad Name': expected `str` matching regex '^[a-z0-9][a-z0-9._-]{0,62}(?!\\\\n)$'",
        "run.groupsize is not a key of this file; did you mean group_size?",
        "run.batch.seq_len is 1: expected `int` >= 2",
        "run.batch.tokens_per_batch.per_rnk is not a key of this file; did you mean per_rank?",
        "run.batch.tokens_per_batch.per_rank is missing: Tokens of a batch for each rank of the attached trainer",
        "run.filters[1].nam is not a key of this file; did you mean name?",
        "service.port is '8900': expected `int`, got `str`",
        "service.redis_url is a wrong value: expected `str`, got `int`",
        "engines[1].modle is not a key of this file; did you mean model?",
        "generator[1].url cannot be set: it follows from [service]",
        "generator[1].max-tokens is not a key of this file; did you mean max_tokens?",
        "generator[1].prompts is missing: Source of prompts: FILE.jsonl, FILE.parquet, a datasets folder, "
        "reasoning-gym:DATASET, verifiers:TASKSET, MODULE:FUNCTION, or FILE.toml (a curriculum of several sources)",
        "generator[1].max_tokens is missing: Maximum length of a completion, in tokens",
        'trainer is missing: Options of the trainer, or trainer = "mine" at the top of the file if you start it',
    ]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"generator": GENERATOR | {"engines": ["c"]}}, "generator.engines has 'c', which is no name in [[engines]]"),
        ({"generator": GENERATOR | {"engines": ["smal"]}}, "did you mean small?"),
        ({"generator": GENERATOR | {"engines": []}}, "generator.engines is empty"),
        ({"engines": None}, "generator needs an engine, and the file has none"),
        ({"engines": [{"name": "a", "url": "http://x"}] * 2}, "engines: 2 entries have the name 'a'"),
        ({"engines": [{"name": "a"}]}, "engines[1] (a) lacks model, url, or command with url"),
        ({"engines": [{"command": ["sh"]}]}, "engines[1] (engine-1) lacks url, the address at which command listens"),
        ({"engines": [{"url": "http://x", "model": "m"}]}, "engines[1] (engine-1) has url, so it is not"),
        ({"engines": [{"url": "http://x", "command": ["/no/vllm"]}]}, "engine-1: the command '/no/vllm' is not"),
        ({"generator": GENERATOR | {"group_size": 4}, "run": RUN | {"group_size": 8}}, "group_size is 4, and run."),
        ({"generator": [GENERATOR | {"seed": 1}, GENERATOR | {"seed": 2}]}, "the entries have different seeds"),
        ({"generator": [GENERATOR, GENERATOR | {"prompt_filter": {"max_tokens": 9}}]}, "have different prompt_filter"),
        (
            {"generator": GENERATOR | {"prompt_filter": {"min_difficulty": 0.1}}},
            "generator.prompt_filter: difficulty_field is missing",
        ),
        ({"generator": GENERATOR | {"adapter": "x"}}, "generator.adapter is 'x'; run.adapters has none"),
        ({"run": RUN | {"batch": {}, "adapters": {"x": {"groups_per_batch": 1}}}}, "generator.adapter is missing"),
        ({"generator": GENERATOR | {"prompts": "no.jsonl"}}, "generator.prompts is 'no.jsonl': "),
        ({"generator": GENERATOR | {"tokenizer": "no"}}, "generator.tokenizer is 'no': "),
        ({"generator": GENERATOR | {"min_inflight_groups": 100}}, "generator: min_inflight_groups is 100"),
        ({"generator": {key: GENERATOR[key] for key in ("environment", "prompts", "max_tokens")}}, "tokenizer is miss"),
        (
            {"trainer": {"command": ["sh"], "steps": 1}},
            "trainer has command; remove the options of",
        ),
        ({"trainer": {"model": "no"}}, "trainer.model is 'no': "),
        ({"trainer": {}}, "trainer.model is missing: Model folder"),
        ({"trainer": {"model": ".", "on_publish": "drain"}}, "generator.on_publish is in-flight, and trainer.on_publi"),
        ({"service": {"tokens_file": "."}}, "give --token or REPLAYBUF_UP_TOKEN with the role operator"),
        ({"service": {"tokens_file": "."}}, "Set REPLAYBUF_GENERATE_TOKEN with the role producer"),
        ({"run": RUN | {"strategy": {"name": "one-step"}}}, "run: strategy"),
        ({"run": RUN | {"batch": {"tokens_per_batch": 1, "groups_per_batch": 2}}}, "run: batch.tokens_per_batch is 1"),
        ({"run": RUN | {"name": "r\n"}}, "run.name is 'r\\n': expected `str` matching regex"),
        ({"evaluation": {"prompts": "no.jsonl"}}, "evaluation.prompts is 'no.jsonl': "),
    ],
)
def test_a_contradiction_between_sections_is_one_line(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in problems(tmp_path, **sections)), problems(tmp_path, **sections)


def test_sections_with_wrong_keys_do_not_hide_the_problems_of_others(tmp_path: Path) -> None:
    """The names of a section with a wrong key are known, so a correct reference to it is no problem."""
    engines = [{"name": "a", "url": "http://x", "prot": 1}]
    lines = problems(tmp_path, engines=engines, generator=GENERATOR | {"engines": ["a"], "prompts": "no.jsonl"})
    assert [problem.partition(" ")[0] for problem in lines] == ["engines[1].prot", "generator.prompts"]
    lines = problems(tmp_path, engines=engines, generator=GENERATOR | {"engines": ["x"]})
    assert ["is no name in [[engines]]" in problem for problem in lines] == [False, True]


def test_a_run_without_a_usable_name_is_one_problem(tmp_path: Path) -> None:
    """The generator gets the name from [run], so it lacks nothing of its own."""
    lines = problems(tmp_path, run=RUN | {"name": "Bad Name"})
    assert [problem.partition(" ")[0] for problem in lines] == ["run.name"]


def test_ports_in_use_and_shared_ports_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        planner = Planner(MINIMAL | {"service": {"port": port}}, tmp_path)
        assert planner.plan() is not None
        (problem,) = port_problems(planner.addresses)
    assert f"service.port is {port}: 127.0.0.1:{port}: Address already in use; stop the program" in problem
    pytest.importorskip("torch")
    model = {"model": "."}
    planner = Planner(MINIMAL | {"service": {"port": 8001}, "engines": [model, model]}, tmp_path)
    planner.plan()
    assert [address.port for address in planner.addresses] == [8001, 8001, 8002]
    assert "service.port is 8001, and so is engines[1].port" in next(port_problems(planner.addresses))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[run", "cannot be read"), (b"\xff", "cannot be read")],
)
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(Invalid, match=message):
        read_file(path)


def test_every_key_of_the_schema_has_a_description() -> None:
    """A new option or field without one fails here: options have docstrings, fields one in wire/config.py."""
    schema = file_schema()
    missing = [
        f"{name}.{key}"
        for name, definition in schema["$defs"].items()
        for key, property_ in definition.get("properties", {}).items()
        if not property_.get("description")
    ]
    assert missing == []


def test_the_schema_names_no_machine_and_no_process() -> None:
    """Two prints of the schema are equal: a default that differs between processes is described in words."""
    producer = file_schema()["$defs"]["GeneratorSection"]["properties"]["producer"]
    assert "default" not in producer and "host name" in producer["description"]


def test_the_schema_is_valid_and_accepts_the_example() -> None:
    """JSON Schema 2020-12, as editors use it; a wrong key is an error there too."""
    schema = file_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    example = tomllib.loads(EXAMPLE.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(example)] == []
    assert list(validator.iter_errors(example | {"trainer": {"model": "m", "learning-rate": 1}})) != []
    assert list(validator.iter_errors(example | {"trainer": {"model": "m", "reader_options": {"wait_s": 1}}})) != []
    assert list(validator.iter_errors({"run": RUN})) != []
