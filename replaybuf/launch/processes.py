"""State, memory and processor time of processes, from /proc of Linux; unknown on other systems."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

PROC = Path("/proc")
STATES = {"R": "running", "S": "idle", "D": "disk", "T": "stopped", "t": "traced", "Z": "zombie", "X": "gone"}


class ProcessState(msgspec.Struct, frozen=True):
    """One process now; None = unknown. Sizes are resident bytes, the peak since its start; `cpu_s` used so far."""

    name: str
    pid: int
    state: str
    memory_bytes: int | None = None
    peak_bytes: int | None = None
    cpu_s: float | None = None


def process_states(name: str, pid: int) -> list[ProcessState]:
    """Return the state of a process and of its children, each child by its program's name; empty if it is gone."""
    if not PROC.is_dir():
        return [ProcessState(name, pid, "not known")]
    parent = _read(name, pid)
    return [parent, *(state for child in _children(pid) if (state := _read(None, child)))] if parent else []


def _read(name: str | None, pid: int) -> ProcessState | None:
    try:
        status, stat = ((PROC / str(pid) / file).read_text() for file in ("status", "stat"))
    except (FileNotFoundError, ProcessLookupError):  # race: it ended before the read
        return None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    memory, peak = (
        int(fields[key].split()[0]) * 1024 if key in fields else None for key in ("VmRSS", "VmHWM")
    )  # kibibytes
    user, system = stat.rpartition(")")[2].split()[11:13]  # the program name before may have spaces and brackets
    return ProcessState(
        name=name or fields["Name"].removesuffix("-server"),
        pid=pid,
        state=STATES.get(fields["State"][:1], fields["State"]),
        memory_bytes=memory,
        peak_bytes=peak,
        cpu_s=(int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
    )


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    try:
        paths = sorted((PROC / str(pid) / "task").glob("*/children"))
    except (FileNotFoundError, ProcessLookupError):  # race: the process ended before its folder was read
        return []
    for path in paths:
        try:
            pids += map(int, path.read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # race: the thread ended before the read
            continue
    return pids
