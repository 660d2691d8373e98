"""The options of installed strategies, filters and admissions, for forms that people fill in."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import msgspec

from replaybuf.errors import ReplaybufError
from replaybuf.kernel.strategy.options import StrategyOptions
from replaybuf.plugins.entry_points import ADMISSIONS, FILTERS, STRATEGIES, load, names
from replaybuf.plugins.time_limit import PLUGIN_ERRORS


def describe_plugins() -> dict[str, dict[str, Any]]:
    """Describe the options of each installed strategy, filter and admission, as properties of a JSON Schema.

    The result has them by kind and name.

    A plug-in that does not import is left out: the check of a configuration that names it says why. Imports plug-ins,
    so it is for a thread.
    """
    described: dict[str, dict[str, Any]] = {"strategies": {}, "filters": {}, "admissions": {}}
    for kind, group in (("strategies", STRATEGIES), ("filters", FILTERS), ("admissions", ADMISSIONS)):
        for name in names(group):
            with contextlib.suppress(ReplaybufError, *PLUGIN_ERRORS):
                cls = load(group, name)
                options = msgspec.json.schema(cls.Options)["$defs"][cls.Options.__name__]["properties"]
                shown = {key: value for key, value in options.items() if key not in StrategyOptions.__struct_fields__}
                described[kind][name] = {"description": inspect.cleandoc(cls.__doc__ or ""), "properties": shown}
    return described
