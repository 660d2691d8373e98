"""Memory and processor time of processes, from /proc of Linux; unknown on other systems."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class ProcessUse(NamedTuple):
    """What a process has used since its start: peak of its resident size (None = unknown), processor seconds."""

    name: str
    peak_bytes: int | None
    cpu_s: float


def process_uses(name: str, pid: int) -> list[ProcessUse]:
    """Return the use of a process and of its children, each child by its program's name; empty if it is gone."""
    parent = _read(name, pid)
    return [parent, *(use for child in _children(pid) if (use := _read(None, child)))] if parent else []


def _read(name: str | None, pid: int) -> ProcessUse | None:
    try:
        status, stat = ((PROC / str(pid) / file).read_text() for file in ("status", "stat"))
    except (FileNotFoundError, ProcessLookupError):  # race: it ended before the read
        return None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    user, system = stat.rpartition(")")[2].split()[11:13]  # the program name before may have spaces and brackets
    return ProcessUse(
        name=name or fields["Name"].removesuffix("-server"),
        peak_bytes=int(fields["VmHWM"].split()[0]) * 1024 if "VmHWM" in fields else None,  # kibibytes
        cpu_s=(int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
    )


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    for path in sorted((PROC / str(pid) / "task").glob("*/children")):
        try:
            pids += map(int, path.read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # race: the thread ended before the read
            continue
    return pids
