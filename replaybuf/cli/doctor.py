"""`replaybuf doctor`: check a machine and its Redis for what a service needs, and say what to do."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis.asyncio as aioredis
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replaybuf.errors import ReplaybufError
from replaybuf.kernel import plugins
from replaybuf.store import EmbeddedServer, ServerReport, Store
from replaybuf.store.embedded import least_free_bytes

LARGEST_CLOCK_OFFSET_S = 1.0
SMALLEST_FREE_BYTES = 1 << 30
_EXTRAS = {
    "trainer": ("torch", "transformers", "tokenizers"),
    "demo": ("torch", "transformers", "tokenizers", "jinja2", "reasoning_gym", "matplotlib"),
    "generate": ("tokenizers", "jinja2"),
    "prompts": ("pyarrow",),
    "testing": ("hypothesis",),
    "verifiers": ("verifiers", "transformers", "tokenizers", "jinja2"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: `ok`, `warn` or `fail`, what was seen, what to do."""

    what: str
    level: str
    seen: str
    advice: str = ""


async def examine(redis_url: str | None, data_dir: Path, host: str, port: int, console: Console) -> bool:
    """Print what was found; True where nothing keeps a service from working."""
    findings = [*_machine(data_dir), _port(host, port), *_extras(), *_plugins(), *await _redis(redis_url)]
    table = Table(title="replaybuf doctor", title_justify="left")
    for column in ("check", "", "seen", "what to do"):
        table.add_column(column, overflow="fold")
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for finding in findings:
        mark = f"[{colours[finding.level]}]{finding.level}[/]"
        table.add_row(finding.what, mark, escape(finding.seen), escape(finding.advice))
    console.print(table)
    return all(finding.level != "fail" for finding in findings)


def _machine(data_dir: Path) -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if good else "fail", version, "" if good else "use Python 3.11 or newer")
    folder = data_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    yield _folder(data_dir, folder)
    yield _disk(folder)


def _folder(data_dir: Path, nearest: Path) -> Finding:
    """Try to write where the data folder is, or would be made: permissions alone do not tell."""
    seen = str(nearest) if nearest == data_dir.resolve() else f"would be made in {nearest}"
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        return Finding(
            "data folder", "fail", f"{seen}: {error.strerror}", "make it writable or choose another --data-dir"
        )
    return Finding("data folder", "ok", seen)


def _disk(folder: Path) -> Finding:
    disk = shutil.disk_usage(folder)
    seen = f"{disk.free / 1e9:.1f} GB free" if disk.free >= 1e9 else f"{disk.free / 1e6:.1f} MB free"
    if disk.free < (needed := least_free_bytes(disk.total)):
        return Finding("disk", "fail", seen, f"make room: {needed / 1e6:.1f} MB are needed to start")
    if disk.free <= SMALLEST_FREE_BYTES:
        return Finding(
            "disk", "warn", seen, "free some: the append-only file grows with every group until it is rewritten"
        )
    return Finding("disk", "ok", seen)


def _port(host: str, port: int) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            seen = f"{host}:{port}: {error.strerror}"
            if error.errno != errno.EADDRINUSE:
                return Finding("port", "fail", seen, "choose a --host of this machine, or another --port")
            return Finding("port", "warn", seen, "stop what listens there, or choose another --port (0 = a free one)")
    return Finding("port", "ok", f"{host}:{port} is free")


def _extras() -> Iterator[Finding]:
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        advice = f"pip install 'replaybuf[{extra}]', if you want it" if missing else ""
        seen = f"missing: {', '.join(missing)}" if missing else "installed"
        yield Finding(f"extra {extra}", "warn" if missing else "ok", seen, advice)


def _plugins() -> Iterator[Finding]:
    names = plugins.names(plugins.STRATEGIES)
    broken: list[str] = []
    for name in names:
        try:
            plugins.load(plugins.STRATEGIES, name)
        except ReplaybufError as error:
            broken.append(error.detail)
    advice = "install replaybuf as a package, so that its entry points are known" if not names else ""
    level = "fail" if broken or not names else "ok"
    yield Finding("strategies", level, "; ".join(broken) or ", ".join(names) or "none found", advice)


async def _redis(redis_url: str | None) -> list[Finding]:
    if redis_url is not None:
        return await _examine_store(redis_url, "redis")
    with tempfile.TemporaryDirectory(prefix="replaybuf-doctor-") as scratch:
        server = EmbeddedServer(Path(scratch))
        try:
            await server.start()
        except ReplaybufError as error:
            return [Finding("embedded valkey", "fail", error.detail, "use an own server: --redis-url URL")]
        try:
            return await _examine_store(server.url, "embedded valkey")
        finally:
            await server.stop()


async def _examine_store(url: str, name: str) -> list[Finding]:
    try:
        store = await Store.open(url)
    except ReplaybufError as error:
        return [Finding(name, "fail", error.detail, "start Redis >= 7.0 or Valkey >= 8 there, or correct --redis-url")]
    try:
        report = await store.connection.report()
    finally:
        await store.close()
    checks: list[Callable[[ServerReport], Finding]] = [_durability, _replicas, _memory]
    findings = [
        Finding(name, "ok", f"{store.connection.url}, version {report.version}"),
        *(check(report) for check in checks),
    ]
    return [*findings, await _clock(url)]


def _durability(report: ServerReport) -> Finding:
    strict = report.durability == "strict"
    advice = (
        "" if strict else "CONFIG SET as named, and in the server's configuration file; until then a kill loses data"
    )
    if strict and not report.met_by.startswith("appendfsync always"):
        advice = "for crashes of the whole machine, and for speed: CONFIG SET appendfsync always"
    seen = "; ".join([report.summary, *report.reasons])
    return Finding("durability", "ok" if strict else "warn", seen, advice)


def _replicas(report: ServerReport) -> Finding:
    return Finding("replicas", "ok", f"{report.replicas} connected; --wait-replicas makes writes wait for them")


def _memory(report: ServerReport) -> Finding:
    limit = f"{report.max_memory_bytes / 1e9:.1f} GB" if report.max_memory_bytes else "no bound"
    seen = f"{report.used_memory_bytes / 1e6:.1f} MB used, {limit}, {report.max_memory_policy}"
    good = report.max_memory_policy in ("noeviction", "unknown")
    return Finding("memory", "ok" if good else "fail", seen, "" if good else "set maxmemory-policy noeviction")


async def _clock(url: str) -> Finding:
    client = aioredis.from_url(url, socket_timeout=5.0)
    try:
        started = time.time()
        seconds, micros = await client.time()
        middle = (started + time.time()) / 2
    finally:
        await client.aclose()
    offset = seconds + micros / 1e6 - middle
    good = abs(offset) < LARGEST_CLOCK_OFFSET_S
    advice = "" if good else "synchronise the clocks (NTP): ticket deadlines would be off by this much"
    return Finding("clock", "ok" if good else "warn", f"{offset * 1000:+.0f} ms against Redis", advice)
