"""Memory and state of processes, as Linux tells them in /proc; elsewhere nothing is known, and that is said as such."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

PROC = Path("/proc")
STATES = {"R": "running", "S": "idle", "D": "disk", "T": "stopped", "t": "traced", "Z": "zombie", "X": "gone"}


class ProcessState(msgspec.Struct, frozen=True):
    """One process now; None = not known.

    `state` is a word; sizes are resident bytes, `peak_bytes` since it started; `cpu_s` is processor time used so far.
    """

    name: str
    pid: int
    state: str
    memory_bytes: int | None = None
    peak_bytes: int | None = None
    cpu_s: float | None = None


def look(name: str, pid: int) -> list[ProcessState]:
    """Describe a process and the processes it started itself, each by its program's name; empty where none exists."""
    own = _read(name, pid)
    if own is None:
        return []
    found = [own]
    for child in _children(pid):
        described = _read(None, child)
        if described is not None:
            found.append(described)
    return found


def _read(name: str | None, pid: int) -> ProcessState | None:
    if not PROC.is_dir():
        return ProcessState(name or str(pid), pid, "not known")
    try:
        text = (PROC / str(pid) / "status").read_text()
        cpu_s = _cpu_s((PROC / str(pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return None
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    return ProcessState(
        name=name or fields["Name"].removesuffix("-server"),
        pid=pid,
        state=STATES.get(fields["State"][:1], fields["State"]),
        memory_bytes=_size(fields.get("VmRSS")),
        peak_bytes=_size(fields.get("VmHWM")),
        cpu_s=cpu_s,
    )


def _children(pid: int) -> Iterator[int]:
    for path in sorted((PROC / str(pid) / "task").glob("*/children")):
        try:
            yield from map(int, path.read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # the thread ended while we looked
            continue


def _cpu_s(stat: str) -> float:
    user, system = stat.rpartition(")")[2].split()[11:13]  # the name before may hold spaces and brackets itself
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _size(kibibytes: str | None) -> int | None:
    return None if kibibytes is None else int(kibibytes.split()[0]) * 1024
