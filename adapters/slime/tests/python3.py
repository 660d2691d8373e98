"""Stand-in for `python3 train.py OPTIONS` of slime: its own parser of options, and its loop without a GPU."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from slime_loop import train
from slime_source import load

from tests.pinned_source import stand_in


def megatron_options(words: list[str]) -> dict[str, Any]:
    """Return the options that slime's parser leaves to Megatron, numbers as such. Sizes that nobody set are None."""
    options: dict[str, Any] = dict.fromkeys(("num_experts", "q_lora_rank", "moe_ffn_hidden_size"))
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            value = True if after.startswith("--") else int(after) if after.isdecimal() else after
            options[word.removeprefix("--").replace("-", "_")] = value
    return options


def main() -> None:
    """Train with the options that slime understands; print those that are Megatron's or SGLang's."""
    source = Path.cwd()
    assert sys.argv[1] == "train.py" and (source / "train.py").exists()
    load(source)
    stand_in(["slime.backends.sglang_utils.arguments"])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module("slime.utils.arguments").get_slime_extra_args_provider()(parser)
    args, others = parser.parse_known_args(sys.argv[2:])
    print(*(option for option in others if option.startswith("--")))
    settings = megatron_options(others) | vars(args) | yaml.safe_load(Path(args.custom_config_path).read_text())
    train(source, settings | {"kill_at": os.environ.get("KILL_AT")})


if __name__ == "__main__":
    main()
