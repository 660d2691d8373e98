"""Check of prime-rl's release and of the layout of its micro-batches, before the first file is written.

The files name no fields: a trainer whose fields have another order would train on wrong columns without an error. So
the source of the trainer's prime-rl is read. It is not imported, because it needs another Python and GPUs.
"""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from replaybuf.errors import Invalid
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf_prime_rl.micro_batches import PrimeMicroBatch

TESTED = "0.8"
"""The series of releases that is tested."""
TYPES = Path("transports", "rollouts", "types.py")
CLASS = "MicroBatch"
_WAY_OUT = "install prime-rl 0.8.0 (commit 559b447) for the trainer, or a replaybuf-prime-rl for its release"


def check_layout(package: Path) -> None:
    """Raise `Invalid` if the prime-rl in the folder `package` is not one that reads the files of this package."""
    release = _release(package)
    if release is not None and not release.startswith(f"{TESTED}."):
        raise _misfit(package, f"is release {release}; tested: {TESTED}")
    file = package / TYPES
    try:
        tree = ast.parse(read_bounded(file, CONFIG_BYTES))
    except (OSError, SyntaxError, ValueError) as error:
        raise _misfit(package, f"has no readable {TYPES}: {error}") from error
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == CLASS]
    if not classes:
        raise _misfit(package, f"has no class {CLASS} in {TYPES}")
    if "array_like=True" not in map(ast.unparse, classes[0].keywords):
        raise _misfit(package, f"has micro-batches that are not arrays: {ast.unparse(classes[0]).splitlines()[0]}")
    lines = [line for line in classes[0].body if isinstance(line, ast.AnnAssign)]
    written = list(PrimeMicroBatch.__annotations__.items())
    read = [(ast.unparse(line.target), ast.unparse(line.annotation)) for line in lines[: len(written)]]
    if read != written:  # later fields have defaults
        raise _misfit(package, f"has micro-batches of {_listed(read)}; written here: {_listed(written)}")


def _release(package: Path) -> str | None:
    """Return the release, from the metadata beside an installed package or the file of a checkout; None if neither."""
    for installed in distributions(path=[str(package.parent)]):
        if re.sub(r"[-_.]+", "-", installed.name).lower() == "prime-rl":
            return installed.version
    try:
        project = tomllib.loads(read_bounded(package.parents[1] / "pyproject.toml", CONFIG_BYTES).decode())["project"]
        return str(project["version"]) if project["name"] == "prime-rl" else None
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _listed(fields: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in fields)


def _misfit(package: Path, detail: str) -> Invalid:
    return Invalid(f"prime-rl in {package} {detail}; {_WAY_OUT}", name="prime_rl", value=str(package), bound=TESTED)
