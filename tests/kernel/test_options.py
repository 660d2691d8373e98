"""Descriptions and errors of the options of strategies and filters."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from replaybuf.client.reader import ReaderOptions
from replaybuf.errors import Invalid
from replaybuf.kernel.strategy.contract import Strategy
from replaybuf.kernel.strategy.options import StrategyOptions, check_options, describe_options, option_ranges
from replaybuf.service.options import ServeOptions


class Every(StrategyOptions, frozen=True):
    """Options of every kind."""

    needed: bool
    order: Literal["fifo", "uniform"] = "fifo"
    share: Annotated[float, Meta(gt=0, le=1), Meta(description="A part of all.")] = 0.5
    uses: Annotated[int, Meta(ge=1)] | None = None
    mix: dict[str, Annotated[float, Meta(ge=0)]] = msgspec.field(default_factory=dict)
    names: list[str] = msgspec.field(default_factory=list)
    steps: Annotated[int, Meta(ge=0, le=2**31 - 1)] | msgspec.UnsetType = msgspec.UNSET


DESCRIBED = [
    ("needed", "true | false", "required"),
    ("order", "fifo | uniform", '"fifo"'),
    ("share", "number > 0 and <= 1", "0.5"),
    ("uses", "int >= 1 or null", "null"),
    ("mix", "{text: number >= 0}", "{}"),
    ("names", "[text, ...]", "[]"),
    ("steps", "int >= 0", "unset"),
]


def test_an_option_is_described_with_its_range_and_default() -> None:
    """A bound that only keeps a number within its type is left out."""
    described = describe_options(Every)
    assert [option[:3] for option in described] == DESCRIBED
    assert {option.name: option.meaning for option in described if option.meaning} == {"share": "A part of all."}


@pytest.mark.parametrize(("name", "accepts", "default"), DESCRIBED)
def test_a_range_includes_the_default_if_there_is_one(name: str, accepts: str, default: str) -> None:
    assert option_ranges(Every)[name] == accepts + (f" (default {default})" if name not in ("needed", "steps") else "")


def test_a_strategy_without_options_has_an_empty_description() -> None:
    assert describe_options(Strategy.Options) == () and option_ranges(Strategy.Options) == {}


@pytest.mark.parametrize(
    "options",
    [
        ReaderOptions(poll_s=7.5, direct_redis_url="redis://ranks:SECRET@redis:6379/0"),
        ServeOptions(wait_timeout_s=7.5, redis_url="redis://serve:SECRET@redis:6379/0"),
    ],
    ids=["ReaderOptions", "ServeOptions"],
)
def test_the_text_of_options_has_no_password(options: object) -> None:
    """Logs and tracebacks show all other options."""
    for shown in (repr(options), str(options), f"{options}"):
        assert "SECRET" not in shown and "=7.5" in shown and shown.startswith(type(options).__name__)


class Needy(StrategyOptions, frozen=True):
    """Two required options."""

    low: Annotated[int, Meta(ge=0)]
    high: Annotated[int, Meta(ge=0)]
    share: Annotated[float, Meta(gt=0, le=1), Meta(description="A part of all.")] = 0.5


@pytest.mark.parametrize(
    ("options", "detail"),
    [
        ({}, "missing required options: low: int >= 0; high: int >= 0"),
        (
            {"low": 1, "high": 2, "share": 7},
            "share is 7; Expected `float` <= 1.0; valid options: share: number > 0 and <= 1 (default 0.5)",
        ),
        (
            {"low": 1, "high": 2, "lo": 3},
            "Object contains unknown field `lo`; valid options: low: int >= 0; high: int >= 0; "
            "share: number > 0 and <= 1 (default 0.5)",
        ),
    ],
    ids=["missing", "out of range", "unknown"],
)
def test_an_invalid_option_names_its_reason_first(options: dict[str, float], detail: str) -> None:
    """The error names all missing options, and only the range of an option that is out of range."""
    with pytest.raises(Invalid) as caught:
        check_options("near", options, Needy)
    assert caught.value.detail == f"options of strategy 'near': {detail}"
