"""Options with several values: the same from JSON, environment and TOML table, and one clear message for wrong ones."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from cyclopts import App, Parameter
from msgspec import Struct

from replaybuf.cli.configuration import sources
from replaybuf.errors import Invalid
from replaybuf.generator.options import GenerateOptions
from replaybuf.lab.demo.run_file import inline_toml
from replaybuf.launch.file import decode_file
from replaybuf.launch.options import check, options_of, words
from replaybuf.option_types import ListenAddress
from replaybuf_trainer.options import TrainOptions

NEEDED: dict[str, dict[str, Any]] = {
    "generate": {
        "engine": "http://e",
        "environment": "e",
        "prompts": "p",
        "tokenizer": "t",
        "max_tokens": 8,
        "url": "http://u",
        "run": "r",
    },
    "train": {"model": "m"},
}
SHAPES = {"generate": GenerateOptions, "train": TrainOptions}
GROUPS: list[tuple[str, str, dict[str, Any]]] = [
    ("generate", "length_penalty", {"cache_tokens": 2, "max_tokens": 8}),
    ("generate", "eval_options", {"every_versions": 2, "environment": "e", "samples": 4, "temperature": 0.5}),
    ("generate", "logprob_options", {"ref": {"micro_batch": 2}, "old": {}, "teacher": {"served_name": "large"}}),
    (
        "generate",
        "prompt_filter",
        {
            "min_tokens": 1,
            "max_tokens": 9,
            "difficulty_field": "x",
            "min_difficulty": 0.1,
            "max_difficulty": 1,
            "drop_duplicates": True,
        },
    ),
    (
        "train",
        "fake_shapes",
        {
            "groups": 2,
            "group_size": 3,
            "seq_len": 64,
            "pad_to_multiple_of": 2,
            "prompt_tokens": 4,
            "completion_tokens": 5,
            "tail": 0,
            "masked_share": 0.5,
            "staleness": 0,
            "vocab_size": 9,
        },
    ),
    ("train", "reader_options", {"poll_s": 1, "wait_ms": 1000, "prefetch": False}),
    ("train", "eval_options", {"every_steps": 3, "groups": 2}),
    (
        "train",
        "model_options",
        {"attention": "eager", "activation_checkpointing": 2, "compile": True, "liger": True},
    ),
    ("train", "lora_options", {"alpha": 32, "targets": ["q_proj", "v_proj"]}),
    ("train", "tables_options", {"dir": "tables", "keep": 1}),
    ("train", "loss_options", {"clip_high": 0.28, "reference": {"weight": 0.1}}),
    ("train", "publisher_options", {"host": "10.0.0.2", "port": 0}),
]
"""A value of each group, with all keys that it has."""
WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("generate", "length_penalty", {"max_tokens": 8}, "missing required field `cache_tokens`"),
    ("generate", "length_penalty", {"cache_tokens": 0}, r"Expected `int` >= 1 - at `\$\.cache_tokens`"),
    ("generate", "length_penalty", {"cache_tokens": 9}, "cache_tokens is 9; the maximum is 8"),
    ("generate", "eval_options", {"every_versions": 0}, r">= 1 - at `\$\.every_versions`"),
    ("generate", "eval_options", {"temperature": -1}, r">= 0.* - at `\$\.temperature`"),
    ("generate", "logprob_options", {"old": {"micro_batch": 0}}, r">= 1 - at `\$\.old\.micro_batch`"),
    ("generate", "prompt_filter", {"min_tokens": "1"}, r"Expected `int \| null`, got `str` - at `\$\.min_tokens`"),
    ("generate", "prompt_filter", {"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; max_tokens is 4: no prompt"),
    ("generate", "prompt_filter", {"min_difficulty": 1}, "difficulty_field is missing: the field and its bounds"),
    ("train", "fake_shapes", {"groups": 0}, r">= 1 - at `\$\.groups`"),
    ("train", "fake_shapes", {"prompt_tokens": 400}, "prompts have up to 600 tokens, and seq_len is 512"),
    ("train", "reader_options", {"poll_s": 0}, r"> 0.* - at `\$\.poll_s`"),
    ("train", "eval_options", {"groups": 0}, r">= 1 - at `\$\.groups`"),
    ("train", "model_options", {"attention": "fast"}, r"Invalid enum value 'fast' - at `\$\.attention`"),
    ("train", "model_options", {"activation_checkpointing": -1}, r">= 0 - at `\$\.activation_checkpointing`"),
    ("train", "lora_options", {"targets": "q_proj"}, r"Expected `array`, got `str` - at `\$\.targets`"),
    ("train", "tables_options", {"keep": 0}, r">= 1 - at `\$\.keep`"),
]


def parsed(command: str, *arguments: str, file: Path | None = None) -> Any:
    """Return the options of a command line, with environment and configuration file."""
    shape = SHAPES[command]

    def take(options: Any) -> Any:
        return options

    take.__annotations__ = {"options": Annotated[shape, Parameter(name="*")]}
    app = App(result_action="return_value")
    app.command(take, name=command)
    app.config = sources(app, file)
    return app([command, *words(command, NEEDED[command]), *arguments], print_error=False, exit_on_error=False)


def flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def group_of(command: str, key: str) -> type[Struct] | None:
    """Return the struct of a group; None for a group with any keys."""
    hint = options_of(command)[key].hint
    return hint if isinstance(hint, type) and issubclass(hint, Struct) else None


def test_every_group_has_a_value_here() -> None:
    """A new group needs one."""
    described = {
        (command, key)
        for command in SHAPES
        for key, option in options_of(command).items()
        if group_of(command, key) or typing.get_origin(option.hint) is dict
    }
    assert described == {(command, key) for command, key, _ in GROUPS}


@pytest.mark.parametrize(("command", "key", "value"), GROUPS)
def test_a_group_is_the_same_from_flag_environment_and_table(
    command: str, key: str, value: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help of the option lists each of its keys, and the file of `up` takes the same table."""
    group, text = group_of(command, key), json.dumps(value)
    expected = value if group is None else msgspec.convert(value, group)
    if group is not None:
        assert set(value) == set(group.__struct_fields__)
        assert all(name in options_of(command)[key].help for name in value)
    by_flag = parsed(command, flag(key), text)
    holder = by_flag if hasattr(by_flag, key) else by_flag.logprobs
    assert getattr(holder, key) == expected
    (tmp_path / "c.toml").write_text(f"[{command}]\n{key} = {inline_toml(value)}\n")
    assert parsed(command, file=tmp_path / "c.toml") == by_flag
    monkeypatch.setenv(f"REPLAYBUF_{command}_{key}".upper(), text)
    assert parsed(command) == by_flag
    check(command, NEEDED[command] | {key: value})


@pytest.mark.parametrize(("command", "key", "_"), GROUPS)
@pytest.mark.parametrize("text", ["{", "[1]", "3", "\ud800"])
def test_text_that_is_not_a_json_object_is_refused(command: str, key: str, _: Any, text: str) -> None:
    with pytest.raises(Invalid, match="it must be a JSON object") as refused:
        parsed(command, flag(key), text)
    assert (refused.value.name, refused.value.value) == (flag(key), text)


@pytest.mark.parametrize(("command", "key"), [(command, key) for command, key, _ in GROUPS if group_of(command, key)])
def test_an_unknown_key_is_refused_with_the_valid_ones(command: str, key: str) -> None:
    """In the file of `up` by its place, with the nearest key."""
    group = group_of(command, key)
    assert group is not None
    with pytest.raises(
        Invalid, match=rf"^{flag(key)} is '.*unknown field `keyz`.*the keys {', '.join(group.__struct_fields__)}$"
    ):
        parsed(command, flag(key), '{"keyz": 1}')
    section, table = ("generator" if command == "generate" else "trainer"), NEEDED[command]
    problems = decode_file({section: {**table, key: {"keyz": 1}}}).problems
    assert any(problem.startswith(f"{section}.{key}.keyz is not a key of this file") for problem in problems)


@pytest.mark.parametrize(("command", "key", "value", "message"), WRONG)
def test_a_wrong_value_is_refused_with_its_place_and_bound(
    command: str, key: str, value: dict[str, Any], message: str
) -> None:
    """By the command, and by `up` before anything starts."""
    with pytest.raises(Invalid, match=message):
        options = parsed(command, flag(key), json.dumps(value))
        options.check()
    with pytest.raises(Invalid, match=message):
        check(command, NEEDED[command] | {key: value})


def test_a_flag_replaces_all_keys_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[train.lora_options]\nalpha = 3\ntargets = ['q_proj']\n")
    options = parsed("train", "--lora-options", '{"alpha": 4}', file=tmp_path / "c.toml")
    assert (options.lora_options.alpha, options.lora_options.targets) == (4, ())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0", ("127.0.0.1", 0)),
        (":9100", ("127.0.0.1", 9100)),
        ("0.0.0.0:9100", ("0.0.0.0", 9100)),
        ("[::1]:65535", ("::1", 65535)),
        ("node-1:80", ("node-1", 80)),
    ],
)
@pytest.mark.parametrize("command", SHAPES)
def test_an_address_to_listen_on_has_a_port_and_is_loopback_without_a_host(
    command: str, text: str, address: tuple[str, int], tmp_path: Path
) -> None:
    assert parsed(command, "--metrics-address", text).metrics_address == ListenAddress(*address)
    (tmp_path / "c.toml").write_text(f"[{command}]\nmetrics_address = {text if text.isdigit() else json.dumps(text)}\n")
    assert parsed(command, file=tmp_path / "c.toml").metrics_address == address
    check(command, NEEDED[command] | {"metrics_address": int(text) if text.isdigit() else text})


@pytest.mark.parametrize("text", ["", "host", "host:", "1:65536", "65536", "-1", "1.5", "http://host:1"])
def test_another_address_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="it must be HOST:PORT or PORT, with a port from 0 to 65535") as refused:
        parsed("train", f"--metrics-address={text}")
    assert (refused.value.name, refused.value.value) == ("--metrics-address", text)
