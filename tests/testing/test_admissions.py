"""The contract suite finds what an admission plug-in does wrong."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from replaybuf.admission import Admission, Group, Refusal
from replaybuf.errors import StrategyFault
from replaybuf.testing import AdmissionContract, check_admission


class Short(Admission[Any]):
    """Refuses long groups."""

    reasons = ("long_group",)

    def check(self, group: Group) -> Refusal | None:
        return Refusal("long_group", f"{group.tokens} tokens") if group.tokens > 9 else None


class TestShort(AdmissionContract):
    def build(self) -> Short:
        return Short({})


class Undeclared(Short):
    """Gives a reason that it does not declare."""

    reasons: ClassVar[Any] = ()


class Unlabelled(Short):
    """Has a reason that cannot label a metric."""

    reasons: ClassVar[Any] = ("Long group",)


class Unknown(Short):
    """Requires a column that no group has."""

    requires: ClassVar[Any] = ("entropy",)


class Text(Short):
    """Returns a text."""

    def check(self, group: Group) -> Any:
        return "no"


class Moody(Short):
    """Answers by its number of calls."""

    calls = 0

    def check(self, group: Group) -> Refusal | None:
        self.calls += 1
        return Refusal("long_group") if self.calls % 2 else None


class Naive(Short):
    """Cannot read the proofs that a hostile producer sends."""

    requires = ("proofs",)

    def check(self, group: Group) -> Refusal | None:
        assert group.proofs is not None
        group.proofs[:4].view("<i4")
        return None


@pytest.mark.parametrize(
    ("plugin", "rule"),
    [
        (Undeclared, "check gives only its reasons"),
        (Unlabelled, "reasons are a tuple of words"),
        (Unknown, "requires names optional columns"),
        (Text, "check returns Refusal or None"),
        (Moody, "check gives the same answer again"),
    ],
)
def test_a_broken_rule_is_named(plugin: type[Short], rule: str) -> None:
    with pytest.raises(StrategyFault, match=rule):
        check_admission(lambda: plugin({}))


def test_a_plug_in_meets_odd_proofs() -> None:
    with pytest.raises(ValueError, match="divisor"):
        check_admission(lambda: Naive({}))
