"""The tokenizer of a model folder, without transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.wire.text.model_tokenizer import Tokenizer
from tests.generator.doubles import LETTERS, make_tokenizer, write_tokenizer

EOS = len(LETTERS)


def test_text_round_trips_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    assert tokenizer.encode("cab>") == [2, 0, 1, 26]
    assert tokenizer.decode([[2, 0, 1, EOS], [EOS], [], [0, 1000]]) == ["cab", "", "", "a"], "models have more ids"
    assert tokenizer.vocab_size == EOS + 1


def test_the_end_of_sequence_comes_from_generation_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token="a")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 3]}))
    assert Tokenizer(tmp_path).eos_token_ids == {EOS, 3}


@pytest.mark.parametrize("eos_token", ["</s>", {"content": "</s>", "lstrip": False}])
def test_without_generation_config_it_comes_from_the_tokenizer(tmp_path: Path, eos_token: object) -> None:
    assert Tokenizer(write_tokenizer(tmp_path, eos_token=eos_token)).eos_token_ids == {EOS}


def test_messages_are_rendered_by_the_folders_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a>{% endif %}"
    )
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=template, eos_token="</s>"))
    assert tokenizer.render([{"role": "u", "content": "hi"}]) == "u>hi</s>a>"


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    assert Tokenizer(write_tokenizer(tmp_path, chat_template=several)).render([{"role": "u"}]) == "d"


def test_a_template_file_overrides_the_configuration(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer(tmp_path).render([{"role": "u"}]) == "new"


def test_a_template_cannot_reach_the_interpreter(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Invalid, match="chat template"):
        Tokenizer(write_tokenizer(tmp_path, chat_template=template)).render([{"role": "u"}])


def test_a_template_that_rejects_messages_reports_why(tmp_path: Path) -> None:
    template = "{{ raise_exception('no system role') }}"
    with pytest.raises(Invalid, match="no system role"):
        Tokenizer(write_tokenizer(tmp_path, chat_template=template)).render([{"role": "system"}])


def test_messages_without_a_template_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no chat template"):
        make_tokenizer(tmp_path).render([{"role": "u"}])


def test_a_folder_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Invalid, match=r"tokenizer\.json does not load"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"{", b'{"eos_token": "\xff"}'])
def test_a_broken_configuration_is_rejected(tmp_path: Path, content: bytes) -> None:
    """Cut short, or not UTF-8."""
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(Invalid, match=r"tokenizer_config\.json does not decode"):
        Tokenizer(tmp_path)


def test_without_the_library_the_error_has_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'replaybuf\[generate\]'"):
        Tokenizer(tmp_path)
