"""Options of commands as keys of a section: nothing is written twice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from replaybuf.errors import Invalid
from replaybuf.launch.options import check, options_of, secrets, words

GENERATE = {"engine": ["http://x"], "environment": "e", "prompts": "p", "tokenizer": "t", "max_tokens": 3}
GENERATE |= {"url": "http://y", "run": "r"}


@pytest.mark.parametrize("command", ["serve", "generate", "eval", "train", "engine"])
def test_every_option_has_a_toml_type_and_a_text(command: str) -> None:
    """Types are those of TOML: a default of an option is a value of its type."""
    for option in options_of(command).values():
        assert option.help and option.flag.startswith("--")
        if isinstance(option.default, (str, int, float, bool)):
            msgspec.convert(option.default, option.hint)


def test_values_become_flags_and_secrets_become_environment_variables() -> None:
    values = {"engine": ["a", "-b"], "shuffle": False, "temperature": 0.5, "token": "t", "engine_api_key": "k"}
    flags = ["--engine", "a", "--engine=-b", "--no-shuffle", "--temperature", "0.5"]
    assert words("generate", values) == flags
    assert secrets("generate", values) == {"REPLAYBUF_GENERATE_TOKEN": "t", "REPLAYBUF_GENERATE_ENGINE_API_KEY": "k"}
    assert "redis_url" in secrets("serve", {"redis_url": "u"}).popitem()[0].lower()


def test_values_are_checked_as_the_command_checks_them(tmp_path: Path) -> None:
    """Bounds of single options, and contradictions between them."""
    check("generate", GENERATE)
    with pytest.raises(Invalid, match="min_inflight_groups is 100; it must be from 1 to max_inflight_groups, 64"):
        check("generate", GENERATE | {"min_inflight_groups": 100})
    with pytest.raises(Invalid, match="--port"):
        check("serve", {"port": 65536})


def test_the_loss_of_a_trainer_is_checked_before_anything_starts() -> None:
    """Its name, and its options; only the trainer's package knows them."""
    check("train", {"model": "m", "loss": "gspo", "loss_options": {"clip_low": 0.1}})
    with pytest.raises(Invalid, match=r"loss is 'gpso'; installed: .*gspo"):
        check("train", {"model": "m", "loss": "gpso"})
    with pytest.raises(Invalid, match=r"loss-options of grpo .*unknown field `clip`"):
        check("train", {"model": "m", "loss_options": {"clip": 0.1}})
