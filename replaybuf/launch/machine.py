"""Checks of this machine before anything starts: files that must exist, programs, extras, ports."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replaybuf.launch.plan import Address
from replaybuf.launch.supervisor import Program

INPUTS = frozenset({"model", "tokenizer", "tokens_file", "ref_model", "prompts", "eval_prompts"})
"""Options that name a file or folder to read."""
FILE_ENDINGS = (".jsonl", ".parquet", ".toml")
"""A source of prompts with another ending may be a name or MODULE:FUNCTION."""
MODEL_FOLDERS = frozenset({("engine", "model"), ("train", "model")})
TORCH_COMMANDS = ("engine", "train")


def file_problems(
    where: str, command: str, values: Mapping[str, Any], folder: Path, made_later: Path | None = None
) -> list[str]:
    """List missing input files of one command, but none in `made_later`. `folder`: where relative paths start."""
    problems = []
    for key in sorted(INPUTS & values.keys()):
        path = folder / str(values[key])
        if made_later is not None and path.is_relative_to(made_later):
            continue
        if _is_path(command, key, str(values[key])) and not path.exists():
            hint = "; `replaybuf init-model --out DIR` makes a small one" if (command, key) in MODEL_FOLDERS else ""
            problems.append(f"{where}.{key} is {str(values[key])!r}: {path} does not exist{hint}")
    missing = [module for module in ("torch", "transformers") if importlib.util.find_spec(module) is None]
    if command in TORCH_COMMANDS and missing:
        problems.append(f"{where} needs {' and '.join(missing)}: pip install 'replaybuf[trainer]'")
    return problems


def program_problem(program: Program) -> str | None:
    """Return what is wrong with the first word of a person's own command."""
    word = program.command[0]
    path = program.folder / word if program.folder and "/" in word else word
    if shutil.which(path) is None:
        return f"{program.name}: the command {word!r} is not an executable in PATH or below {program.folder}"
    return None


def port_problems(addresses: Sequence[Address]) -> Iterator[str]:
    """Yield the ports that two parts of the file share, and those in use on this machine."""
    counts = Counter(address.port for address in addresses)
    for address in addresses:
        if counts[address.port] > 1:
            others = [other.where for other in addresses if other.port == address.port and other is not address]
            yield f"{address.where} is {address.port}, and so is {', '.join(others)}; give each its own port"
        elif problem := _use_of(address):
            yield problem


def _use_of(address: Address) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            return (
                f"{address.where} is {address.port}: {address.host}:{address.port}: {error.strerror}; stop the program "
                "that listens there, or choose another port (0 = a free port)"
            )
    return None


def _is_path(command: str, key: str, value: str) -> bool:
    """Return whether a value is a path; the model of generators is a served name."""
    if key == "model":
        return (command, key) in MODEL_FOLDERS
    return key not in ("prompts", "eval_prompts") or value.endswith(FILE_ENDINGS)
