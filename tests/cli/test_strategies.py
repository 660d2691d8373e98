"""`replaybuf strategies`: what is installed, what it takes, whether a class of one's own keeps the contract."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

import replaybuf
from replaybuf import testing
from replaybuf.cli.main import main
from replaybuf.errors import StrategyFault
from replaybuf.kernel import plugins
from replaybuf.kernel.plugins import STRATEGIES

MODULE = '''
import sys
import time

from replaybuf.kernel.strategy import Filter, Strategy, StrategyOptions, Waiting


class Mine(Strategy):
    """Waits."""

    def select(self, groups, buffer, budget, rng):
        return Waiting("no_groups")


class Mute(Mine):
    pass


Mute.__doc__ = None


class Loose(Mine):
    """Its options take anything."""

    class Options(StrategyOptions, frozen=True, forbid_unknown_fields=False):
        pass


class NeedsOne(Mine):
    """Has an option without a default."""

    class Options(StrategyOptions, frozen=True):
        share: float


class Explodes(Mine):
    """Cannot be built."""

    def __init__(self, options):
        raise KeyError("nothing")


class Leaves(Mine):
    """Ends whoever builds it."""

    def __init__(self, options):
        sys.exit("nothing")


class Sleeps(Mine):
    """Takes long to build."""

    def __init__(self, options):
        time.sleep(8)


class Sieve(Filter):
    """Drops nothing."""

    def drop(self, groups, buffer):
        raise NotImplementedError


class NoStrategy:
    """Something else."""
'''


def test_the_list_names_the_built_ins_with_their_distribution_and_first_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line each."""
    monkeypatch.setenv("COLUMNS", "160")
    main(["strategies", "list"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {"on-policy", "one-step-off-policy"} <= lines.keys()
    assert "replaybuf 0.1.0" in lines["on-policy"]
    assert "Staleness 0, each group once, oldest first, no look-ahead." in lines["on-policy"]


def test_one_that_does_not_import_is_listed_with_its_cause(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the exit code says so."""
    monkeypatch.setenv("COLUMNS", "200")
    broken = EntryPoints([EntryPoint("broken", "no_such_module:X", STRATEGIES)])
    monkeypatch.setattr(plugins, "installed", lambda group: broken.select(group=group))
    with pytest.raises(SystemExit) as ended:
        main(["strategies", "list"])
    assert ended.value.code == 1
    assert "unknown distribution" in (shown := capsys.readouterr().out) and "does not import" in shown


def test_one_strategy_is_shown_with_what_it_promises(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docstring, bounds, options; an unknown name is refused with the installed ones."""
    monkeypatch.setenv("COLUMNS", "160")
    main(["strategies", "show", "one-step-off-policy"])
    shown = capsys.readouterr().out
    assert "Invariant: 0 <= version(step) - policy_version <= k" in shown
    assert "max_staleness 1, max_uses 1, look_ahead 1" in shown
    assert re.search(r"max_staleness +int >= 0 +1", shown)
    main(["strategies", "show", "on-policy"])
    assert "no options" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["strategies", "show", "nobody"])
    told = capsys.readouterr().err
    assert "name is 'nobody'; installed: strategy: " in told and "; filter: overlong, " in told


def test_filters_are_listed_and_shown_beside_the_strategies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their options with types, defaults and ranges; a filter promises no bounds."""
    monkeypatch.setenv("COLUMNS", "160")
    main(["strategies", "list"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {"overlong", "reward-window", "zero-variance"} <= lines.keys()
    assert "replaybuf 0.1.0" in lines["overlong"] and "Drop groups by length" in lines["overlong"]
    main(["strategies", "show", "overlong"])
    shown = capsys.readouterr().out
    assert re.search(r"max_tokens +int >= 2 or null +null", shown) and "by default" not in shown


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working folder, and a contract suite that notes what it is given."""
    (tmp_path / "own_strategies.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_strategies", raising=False)

    def keep(build: Any) -> None:
        """Hold it to a rule. Raises nothing."""
        assert build() is not build()

    for name in ("check_strategy", "check_progress", "check_filter"):
        monkeypatch.setattr(testing, name, keep)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize("name", ["Mine", "Sieve", "NeedsOne"])
def test_a_sound_class_passes_every_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A strategy, a filter, and one with an option that it needs; the suite among the checks."""
    main(["strategies", "check", f"own_strategies:{name}", *(["--option", "share=0.5"] if name == "NeedsOne" else [])])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 5 and all(line.startswith("ok") for line in lines)
    assert "keeps the rules of a" in " ".join(lines[4:])


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NoStrategy", "is not a subclass of replaybuf.strategy.Strategy"),
        ("Mute", "the class has no docstring"),
        ("Loose", "Options lacks forbid_unknown_fields=True"),
        ("NeedsOne", "share"),
        ("Explodes", "own_strategies:Explodes' raised KeyError('nothing') when it was configured"),
        ("Leaves", "own_strategies:Leaves' raised SystemExit('nothing') when it was configured"),
        ("Sleeps", "own_strategies:Sleeps', when it was configured, did not come to an end within 1 s"),
    ],
)
def test_a_class_that_is_not_sound_fails_with_the_rule(
    name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1; the check that failed comes last."""
    with pytest.raises(SystemExit) as ended:
        main(["strategies", "check", f"own_strategies:{name}"])
    assert ended.value.code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("fail") and told in last


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (StrategyFault("rule 'keeps the budget' is broken"), "rule 'keeps the budget' is broken"),
        (SystemExit(3), "strategy, over random buffers: raised SystemExit(3) in"),
        (ZeroDivisionError("x"), "strategy, over random buffers: raised ZeroDivisionError('x') in"),
    ],
)
def test_what_the_suite_finds_is_told(
    fault: BaseException, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken rule as a failed check, an exception of the class by its name."""

    def break_it(build: Any) -> None:
        raise fault

    monkeypatch.setattr(testing, "check_strategy", break_it)
    with pytest.raises(SystemExit) as ended:
        main(["strategies", "check", "own_strategies:Mine"])
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert told in captured.out + captured.err


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("own_strategies", "class is 'own_strategies'; it must be MODULE:CLASS or an installed name: on-policy,"),
        ("no_such_module:X", "'no_such_module:X' does not import: ModuleNotFoundError"),
        ("replaybuf.kernel.strategy:Nothing", "does not import: AttributeError"),
    ],
)
def test_what_is_no_class_is_refused(target: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the form that is needed, or the cause."""
    with pytest.raises(SystemExit):
        main(["strategies", "check", target])
    assert told in capsys.readouterr().err


def test_the_suite_is_named_with_its_extra_where_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shape and options are checked all the same."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "replaybuf.testing")
    monkeypatch.delattr(replaybuf, "testing")
    with pytest.raises(SystemExit):
        main(["strategies", "check", "on-policy"])
    captured = capsys.readouterr()
    assert captured.out.startswith("ok") and "replaybuf[testing]" in captured.err


@pytest.mark.parametrize("target", ["on-policy", "replaybuf_strategies.one_step_off_policy:OneStepOffPolicy", "replay"])
def test_built_in_strategies_pass_the_real_suite_by_name_and_by_class(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["strategies", "check", target])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(line.startswith("ok") for line in lines)


def test_text_of_a_strategy_is_broken_where_the_terminal_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where its source has line ends, too: items stay items, paragraphs stay paragraphs."""
    monkeypatch.setenv("COLUMNS", "400")
    main(["strategies", "show", "replay"])
    told = capsys.readouterr().out
    assert "times_sampled < u before a use; step - last_step > c; fresh groups >= f" in told
    assert "or at random by priority, with `priority` as x" in told
    assert re.search(r"^- `cooldown` \(c\): steps that a group rests after a use *\n- `samples", told, re.MULTILINE)
