"""`replaybuf strategies`: list, show and check."""

from __future__ import annotations

import inspect
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
from replaybuf.plugins import entry_points as plugins
from replaybuf.plugins.entry_points import ADMISSIONS, STRATEGIES
from replaybuf_strategies.replay import Replay

MODULE = '''
import sys
import time

from replaybuf.kernel.strategy.contract import Filter, Strategy, StrategyOptions, Waiting


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
    """Exits the process that builds it."""

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


def test_a_strategy_that_does_not_import_is_listed_with_its_cause(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 1."""
    monkeypatch.setenv("COLUMNS", "200")
    broken = EntryPoints([EntryPoint("broken", "no_such_module:X", STRATEGIES)])
    monkeypatch.setattr(plugins, "installed", lambda group: broken.select(group=group))
    with pytest.raises(SystemExit) as ended:
        main(["strategies", "list"])
    assert ended.value.code == 1
    assert "unknown distribution" in (shown := capsys.readouterr().out) and "does not import" in shown


def test_show_prints_docstring_bounds_and_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown name is an error that lists the installed names."""
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
    message = capsys.readouterr().err
    assert "name is 'nobody'; installed: strategy: " in message and "; filter: overlong, " in message


def test_filters_are_listed_and_shown_beside_the_strategies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter has options and no bounds."""
    monkeypatch.setenv("COLUMNS", "160")
    main(["strategies", "list"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {"overlong", "reward-window", "zero-variance"} <= lines.keys()
    assert "replaybuf 0.1.0" in lines["overlong"] and "Drop groups by length" in lines["overlong"]
    main(["strategies", "show", "overlong"])
    shown = capsys.readouterr().out
    assert re.search(r"max_tokens +int >= 2 or null +null", shown) and "by default" not in shown


ADMISSION = '''
from replaybuf.admission import Admission, AdmissionOptions, Refusal


class LeastOptions(AdmissionOptions, frozen=True):
    tokens: int = 1


class Least(Admission[LeastOptions]):
    """Refuse groups with few tokens."""

    Options = LeastOptions
    reasons = ("too_few_tokens",)

    def check(self, group):
        return Refusal("too_few_tokens") if group.tokens < self.options.tokens else None


class Undeclared(Least):
    """Refuse for a reason that it does not declare."""

    def check(self, group):
        return Refusal("another")
'''


def test_admission_plug_ins_are_listed_shown_and_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own_admissions.py").write_text(ADMISSION)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "160")
    mine = EntryPoints([EntryPoint("least-tokens", "own_admissions:Least", ADMISSIONS)])
    monkeypatch.setattr(plugins, "installed", lambda group: mine.select(group=group))
    main(["strategies", "list"])
    assert re.search(r"least-tokens +unknown distribution +Refuse groups with few tokens", capsys.readouterr().out)
    main(["strategies", "show", "least-tokens"])
    assert re.search(r"tokens +int +1", capsys.readouterr().out)
    main(["strategies", "check", "least-tokens", "--option", "tokens=3"])
    assert "keeps the rules of an admission plug-in" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["strategies", "check", "own_admissions:Undeclared"])
    assert "check gives only its reasons" in capsys.readouterr().out


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
    """A strategy, a filter, and a strategy with a required option."""
    main(["strategies", "check", f"own_strategies:{name}", *(["--option", "share=0.5"] if name == "NeedsOne" else [])])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 5 and all(line.startswith("ok") for line in lines)
    assert "keeps the rules of a" in " ".join(lines[4:])


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoStrategy", "is not a subclass of replaybuf.strategy.Strategy"),
        ("Mute", "the class has no docstring"),
        ("Loose", "Options lacks forbid_unknown_fields=True"),
        ("NeedsOne", "share"),
        ("Explodes", "own_strategies:Explodes' raised KeyError('nothing') when it was configured"),
        ("Leaves", "own_strategies:Leaves' raised SystemExit('nothing') when it was configured"),
        ("Sleeps", "own_strategies:Sleeps', when it was configured, did not return within 1 s"),
    ],
)
def test_an_unsound_class_fails_with_the_broken_rule(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and the failed check comes last."""
    with pytest.raises(SystemExit) as ended:
        main(["strategies", "check", f"own_strategies:{name}"])
    assert ended.value.code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("fail") and message in last


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (StrategyFault("rule 'keeps the budget' is broken"), "rule 'keeps the budget' is broken"),
        (SystemExit(3), "strategy, over random buffers: raised SystemExit(3) in"),
        (ZeroDivisionError("x"), "strategy, over random buffers: raised ZeroDivisionError('x') in"),
    ],
)
def test_a_fault_found_by_the_suite_is_printed(
    fault: BaseException, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken rule, or an exception of the class under test."""

    def break_it(build: Any) -> None:
        raise fault

    monkeypatch.setattr(testing, "check_strategy", break_it)
    with pytest.raises(SystemExit) as ended:
        main(["strategies", "check", "own_strategies:Mine"])
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("own_strategies", "class is 'own_strategies'; it must be MODULE:CLASS or an installed name: on-policy,"),
        ("no_such_module:X", "'no_such_module:X' does not import: ModuleNotFoundError"),
        ("replaybuf.kernel.strategy.contract:Nothing", "does not import: AttributeError"),
    ],
)
def test_a_target_that_is_not_a_class_is_an_error(
    target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the required form, or the cause."""
    with pytest.raises(SystemExit):
        main(["strategies", "check", target])
    assert message in capsys.readouterr().err


def test_without_the_suite_the_error_names_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks that need no suite still run."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "replaybuf.testing")
    monkeypatch.delattr(replaybuf, "testing")
    with pytest.raises(SystemExit):
        main(["strategies", "check", "on-policy"])
    captured = capsys.readouterr()
    assert captured.out.startswith("ok") and "replaybuf[testing]" in captured.err


@pytest.mark.parametrize("target", ["on-policy", "replaybuf_strategies.one_step_off_policy:OneStepOffPolicy"])
def test_built_in_strategies_pass_the_real_suite_by_name_and_by_class(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["strategies", "check", target])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(line.startswith("ok") for line in lines)


def test_docstrings_wrap_at_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line breaks of the source are joined; each option has its meaning."""
    monkeypatch.setenv("COLUMNS", "400")
    main(["strategies", "show", "replay"])
    shown = capsys.readouterr().out
    assert "times_sampled < u before a use; step - last_step > c; fresh groups >= f" in shown
    *_, last = inspect.cleandoc(str(Replay.__doc__)).split("\n\n")
    assert "\n" in last and " ".join(last.split()) in shown
    assert re.search(r"^cooldown .* Steps that a group rests after a use", shown, re.MULTILINE)
