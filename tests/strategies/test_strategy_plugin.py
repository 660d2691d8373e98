"""A strategy in a separate distribution: built, installed into a new environment, and served from there.

What strategies do wrong while they run: `tests/service/test_plugins.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import RunClient, ServeProcess, group

EXAMPLE = Path(__file__).parents[2] / "examples" / "strategy-plugin"
TIMEOUT_S = 120.0

ENTRY_POINTS = "[replaybuf.strategies]\nunimportable = broken_strategies.nowhere:Nothing\n"


class Environment:
    """A new Python environment that sees the packages of this one; `python` runs in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        self.site = next((folder / "lib").glob("python*/site-packages"))
        ours = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
        # A line of a .pth file that starts with "import" is run: .pth files of our own folder count too, for one that
        # is installed in place.
        lines = [f"import site; site.addsitedir({path!r})" for path in sorted(ours)]
        (self.site / "ours.pth").write_text("\n".join(lines) + "\n")

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run Python with these arguments; return what it printed. Fails with its output."""
        done = subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=cwd, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel of the example and a distribution whose module is missing."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source")
    pip = [sys.executable, "-m", "pip"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, capture_output=True, timeout=TIMEOUT_S)
    environment = Environment(folder / "env")
    (wheel,) = folder.glob("replaybuf_near_target-*.whl")
    install = ["--python", environment.python, "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, capture_output=True, timeout=TIMEOUT_S)
    metadata = environment.site / "broken_strategies-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-strategies\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return environment


@pytest.fixture(scope="module")
def server(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A service that runs in that environment; each test creates its own runs."""
    server = ServeProcess(tmp_path_factory.mktemp("service") / "data", python=environment.python).start()
    yield server
    server.end()


Connect = Callable[[str, str], RunClient]


def test_the_example_is_listed_and_selects_batches(
    environment: Environment, server: ServeProcess, connect: Connect
) -> None:
    """With its wheel only: the command line lists it, a run accepts its options, its order makes the batch."""
    shown = environment.run("-m", "replaybuf", "strategies", "show", "near-target")
    assert "replaybuf-near-target 0.1.0" in shown
    assert "target" in shown and ">= 0 and <= 1" in shown

    run = connect(server.url, "mine")
    strategy = {"name": "near-target", "options": {"target": 0.5}}
    response = run.put(strategy=strategy, batch={"groups_per_batch": 1})
    assert response.status_code == 201, response.text
    assert run.state()["strategy"]["options"] == {"target": 0.5, "max_staleness": 2}
    run.append(group("solved", rollouts=1), group("half", rollouts=2))
    assert run.batch(0, run.attach()).status_code == 200
    (used,) = run.get("batches/0/record").json()["groups"]
    assert used["group_id"] == "half", "rewards 0 and 1: the mean is on target; the other group's is 0"

    refused = connect(server.url, "other").put(
        strategy={"name": "near-target", "options": {"target": 2}}, batch={"groups_per_batch": 1}
    )
    assert refused.status_code == 422 and "target" in refused.json()["detail"]


def test_the_tests_of_the_example_pass(environment: Environment) -> None:
    """As in its README, without the sources: the wheel is tested."""
    tests = environment.folder.parent / "source" / "tests"
    assert "passed" in environment.run("-m", "pytest", "-p", "no:cacheprovider", ".", cwd=tests)
    checked = environment.run("-m", "replaybuf", "strategies", "check", "replaybuf_near_target:NearTarget", cwd=tests)
    assert all(line.startswith("ok") for line in checked.splitlines())


def test_a_strategy_that_does_not_import_is_rejected(server: ServeProcess, connect: Connect) -> None:
    """No run is created; the message names the plug-in and the cause."""
    refused = connect(server.url, "r").put(strategy={"name": "unimportable"}, batch={"groups_per_batch": 1})
    assert refused.status_code == 422
    assert "broken_strategies.nowhere:Nothing" in refused.json()["detail"]
    assert "does not import" in refused.json()["detail"]
