"""A taskset with tools."""

# mypy: ignore-errors

import verifiers.v1 as vf
from backwards import Backwards

__all__ = ["Tools"]


class Abacus(vf.Toolset):
    """It counts."""


class Tools(Backwards):
    """Words to say backwards, with an abacus."""

    @classmethod
    def toolsets(cls, config):
        """Lend the abacus."""
        return [Abacus(vf.ToolsetConfig())]
