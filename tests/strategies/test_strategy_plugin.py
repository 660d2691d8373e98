"""A strategy in a separate distribution: built, installed into a new environment, and served from there.

And what plug-ins do wrong there: their run pauses with the reason, the service and its other runs go on.
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

BROKEN = '''
from replaybuf.strategy import Selection, Strategy, Waiting


class Raises(Strategy):
    """Raises in `select`."""

    def select(self, groups, buffer, budget, rng):
        raise ZeroDivisionError("of my own making")


class Impossible(Strategy):
    """Selects an unknown group."""

    def select(self, groups, buffer, budget, rng):
        return Selection(groups.row[:1] + 1000) if len(groups) else Waiting("no_groups")


class RaisesInEvict(Strategy):
    """Raises in `evict`."""

    def evict(self, groups, buffer):
        raise ZeroDivisionError("while cleaning up")

    def select(self, groups, buffer, budget, rng):
        return Selection(groups.row[:1]) if len(groups) else Waiting("no_groups")


class Vanishing(Strategy):
    """Works while it is installed."""

    def select(self, groups, buffer, budget, rng):
        return Selection(groups.row[:1]) if len(groups) else Waiting("no_groups")
'''
ENTRY_POINTS = """
[replaybuf.strategies]
raises = broken_strategies:Raises
impossible = broken_strategies:Impossible
raises-in-evict = broken_strategies:RaisesInEvict
vanishing = broken_strategies:Vanishing
unimportable = broken_strategies.nowhere:Nothing
"""


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
    """An environment with the wheel of the example and a distribution of broken strategies."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source")
    pip = [sys.executable, "-m", "pip"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, capture_output=True, timeout=TIMEOUT_S)
    environment = Environment(folder / "env")
    (wheel,) = folder.glob("replaybuf_near_target-*.whl")
    install = ["--python", environment.python, "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, capture_output=True, timeout=TIMEOUT_S)
    (environment.site / "broken_strategies.py").write_text(BROKEN)
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "strategy 'raises' raised in select: ZeroDivisionError('of my own making')"),
        ("impossible", "strategy 'impossible' broke the rule 'selects only groups that are stored'"),
    ],
)
def test_a_strategy_that_breaks_its_contract_pauses_only_its_run(
    server: ServeProcess, connect: Connect, name: str, reason: str
) -> None:
    """The trainer gets `paused`, the state has the reason; another run goes on."""
    broken, sound = connect(server.url, name), connect(server.url, f"beside-{name}")
    broken.put(strategy={"name": name}, batch={"groups_per_batch": 1})
    sound.put(strategy={"name": "near-target"}, batch={"groups_per_batch": 1})
    for run in (broken, sound):
        run.append(group("a"))
    waiting = broken.batch(0, broken.attach())
    assert (waiting.status_code, waiting.json()["reason"], waiting.json()["blocked_on"]) == (202, "paused", "operator")
    assert broken.state()["state"] == "paused"
    assert reason in broken.state()["paused_reason"]
    sound.train(sound.attach(), range(1))

    mended = broken.http.patch(broken.path, json={"strategy": {"name": "on-policy"}, "state": "running"})
    assert mended.status_code == 200, mended.text
    broken.train(broken.attach(), range(1))


def test_a_strategy_that_raises_in_evict_loses_no_group(server: ServeProcess, connect: Connect) -> None:
    """Appends are still stored; the run is paused with the error."""
    broken, sound = connect(server.url, "evict"), connect(server.url, "beside-evict")
    broken.put(strategy={"name": "raises-in-evict"}, batch={"groups_per_batch": 1})
    sound.put(batch={"groups_per_batch": 1})
    for run in (broken, sound):
        assert [result["status"] for result in run.append(group("a"), group("b"))] == ["stored", "stored"]
    assert broken.state()["state"] == "paused"
    assert "while cleaning up" in broken.state()["paused_reason"]
    assert "strategy 'raises-in-evict' raised in evict" in broken.state()["paused_reason"]
    assert broken.batch(0, broken.attach()).json()["reason"] == "paused"
    assert broken.append(group("c"))[0]["status"] == "stored"
    sound.train(sound.attach(), range(2))


def test_a_missing_strategy_after_a_restart_pauses_only_its_run(
    environment: Environment, server: ServeProcess, connect: Connect
) -> None:
    """The service starts, the run reports the missing strategy, and continues once it is back."""
    gone, sound = connect(server.url, "gone"), connect(server.url, "beside-gone")
    gone.put(strategy={"name": "vanishing"}, batch={"groups_per_batch": 1})
    sound.put(batch={"groups_per_batch": 1})
    for run in (gone, sound):
        run.append(group("a"), group("b"))
    server.stop()
    module = environment.site / "broken_strategies.py"
    hidden = module.rename(module.with_suffix(".hidden"))
    try:
        server.start()
        gone, sound = connect(server.url, "gone"), connect(server.url, "beside-gone")
        waiting = gone.batch(0, gone.attach())
        assert (waiting.status_code, waiting.json()["reason"]) == (202, "paused")
        assert "does not import" in gone.state()["paused_reason"]
        sound.train(sound.attach(), range(2))
    finally:
        hidden.rename(module)
    server.stop()
    server.start()
    gone = connect(server.url, "gone")
    assert gone.state()["state"] == "paused", "an operator lets it go on"
    assert gone.http.patch(gone.path, json={"state": "running"}).status_code == 200
    gone.train(gone.attach(), range(1))
