"""Distributions of plug-ins for tests: a module and its entry points in a folder for PYTHONPATH."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_plugins(site: Path, module: str, source: str, classes: Mapping[str, Mapping[str, str]]) -> None:
    """Write a distribution with one module; `classes`: by entry-point group, the class of each name."""
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1\n")
    lines: list[str] = []
    for group, names in classes.items():
        lines += [f"[{group}]", *(f"{name} = {module}:{cls}" for name, cls in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
