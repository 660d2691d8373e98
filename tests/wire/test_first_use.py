"""Which decoders may be used first by several threads at once: each prepares its struct, or one thread owns it.

msgspec crashes if two threads decode the same struct for the first time (`msgspec_first_use.py` shows it). A call at
the top of a module runs under the lock of its import. Every other call that names a struct goes through `prepared`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
FOLDERS = ("replaybuf", "strategies", "trainer", "adapters")
ONE_THREAD = {
    "replaybuf/lab/": "a command, in its main thread",
    "replaybuf/launch/": "the command `up`, in its main thread; its progress has one thread that reads",
    "replaybuf/backup/": "a command, in its event loop",
    "adapters/verifiers/replaybuf_verifiers/worker/": "a process of its own with one event loop",
    "replaybuf/service/http/body/decoder_process.py": "a process of its own with one thread",
    "replaybuf/service/run/append/admission_process.py": "a process of its own with one thread",
    "replaybuf/wire/decoding.py": "the guard itself",
}
"""Folders and files that decode without the guard, and why."""
DECODERS = {"decode": 1, "convert": 1, "Decoder": 0}
"""Functions of msgspec that take a struct, and the place of that argument."""
NO_STRUCTS = {*dir(builtins), "Any", "Raw"}
"""Names in a shape that are no struct: msgspec keeps nothing about them."""


def unguarded(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and shape of each call in a function that decodes to a struct without `prepared`."""
    guarded = ast.parse(source)
    for function in ast.walk(guarded):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        ready = {call.args[0].id for call in _calls(function, "prepared") if isinstance(call.args[0], ast.Name)}
        for name, place in DECODERS.items():
            for call in _calls(function, name):
                shape = _shape(call, place)
                if shape is None or (isinstance(shape, ast.Name) and shape.id in ready):
                    continue
                names = {name.id for name in ast.walk(shape) if isinstance(name, ast.Name)} - {"msgspec"}
                if "prepared" not in names and not names <= NO_STRUCTS:
                    yield call.lineno, ast.unparse(shape)


def _calls(function: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yield the calls of `prepared`, or of a function of msgspec."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        plain = isinstance(called, ast.Name) and called.id == name == "prepared"
        if plain or (isinstance(called, ast.Attribute) and called.attr == name and "msgspec" in ast.unparse(called)):
            yield node


def _shape(call: ast.Call, place: int) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == "type":
            return keyword.value
    return call.args[place] if len(call.args) > place else None


def test_every_struct_that_several_threads_may_decode_first_is_prepared() -> None:
    missing = []
    for path in sorted(path for folder in FOLDERS for path in (TOP / folder).rglob("*.py")):
        name = path.relative_to(TOP).as_posix()
        if not name.startswith(tuple(ONE_THREAD)) and "/tests/" not in name:
            missing += [f"{name}:{line} {shape}" for line, shape in unguarded(path.read_text())]
    assert not missing, "wrap the shape in replaybuf.wire.decoding.prepared:\n" + "\n".join(missing)


def test_the_parts_of_one_thread_are_there() -> None:
    assert all((TOP / name).exists() for name in ONE_THREAD)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        ("msgspec.json.decode(body, type=Status)", "Status"),
        ("msgspec.json.Decoder(Status).decode(body)", "Status"),
        ("msgspec.msgpack.decode(body, type=list[Status])", "list[Status]"),
        ("msgspec.convert(body, Status)", "Status"),
        ("msgspec.convert(body, prepared(Status))", ""),
        ("msgspec.json.decode(body, type=dict[str, Any])", ""),
        ("msgspec.json.decode(body)", ""),
    ],
)
def test_a_new_decoder_of_a_struct_without_a_guard_is_found(call: str, shape: str) -> None:
    within = f"def read(body):\n    return {call}\n"
    assert list(unguarded(within)) == ([(2, shape)] if shape else [])
    assert not list(unguarded(f"found = {call}\n")), "the import of a module has a lock"
