"""How a broken rule of a plug-in is reported."""

from __future__ import annotations

from replaybuf.errors import StrategyFault


def require(kept: object, rule: str, value: object) -> None:
    """Raise `StrategyFault` unless a rule is kept."""
    if not kept:
        raise StrategyFault(f"rule '{rule}' is broken: {value!r}", name=rule, value=value, bound=rule)
