"""The command `replaybuf doctor`: check this machine and its Redis before a service starts."""

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import httpx
from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, Port
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replaybuf.cli.event_loop import run_async
from replaybuf.cli.service import print_json
from replaybuf.errors import Invalid, ReplaybufError, UnsupportedServer
from replaybuf.listening import url_here
from replaybuf.plugins import entry_points as plugins
from replaybuf.service.peers.living_servers import SILENT_S, name_release
from replaybuf.store import EmbeddedServer, ServerReport, Store, WritePolicy
from replaybuf.store.redis.durability import STRICT
from replaybuf.store.redis.embedded import least_free_bytes

LARGEST_CLOCK_OFFSET_S = 1.0
LOW_DISK_BYTES = 1 << 30
READY_TIMEOUT_S = 5.0
_EXTRAS = {
    "trainer": ("torch", "transformers", "tokenizers"),
    "demo": ("torch", "transformers", "tokenizers", "jinja2", "reasoning_gym", "matplotlib"),
    "generate": ("tokenizers", "jinja2"),
    "prompts": ("pyarrow",),
    "testing": ("hypothesis",),
    "verifiers": ("replaybuf_verifiers", "verifiers", "transformers", "tokenizers", "jinja2"),
}
_PACKAGES = {"verifiers": "replaybuf-verifiers"}
"""Packages that bring an extra and more."""
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The service to check for."""

    redis_url: str | None = dataclasses.field(default=None, repr=False)
    """Redis to check. Default: doctor starts the embedded Valkey in a temporary folder and checks it."""
    wait_replicas: NonNegativeInt = 0
    """Number of replicas that the service would wait for."""
    data_dir: Path = Path(".replaybuf/data")
    """Data folder of the service."""
    host: str = "127.0.0.1"
    """Address that the service would listen on."""
    port: Port = 8900
    """Port that the service would listen on."""
    json: bool = False
    """Print the checks as one JSON list of objects with name, state, text and way_out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: `state` is `ok`, `warn` or `fail`; `way_out` is what to do."""

    name: str
    state: str
    text: str
    way_out: str = ""


_DEFAULTS = DoctorOptions()


def doctor(options: Annotated[DoctorOptions, Parameter(name="*")] = _DEFAULTS) -> None:
    """Check whether a service can start on this machine, and print what to do.

    The exit code is 1 if a service cannot start.
    """
    findings = [
        *_machine(options.data_dir),
        _port(options.host, options.port),
        *_extras(),
        _plugins(),
        *run_async(_redis(options.redis_url, options.wait_replicas)),
    ]
    if options.json:
        print_json(findings)
    else:
        Console().print(_table(findings))
    if any(finding.state == "fail" for finding in findings):
        sys.exit(1)


def _table(findings: Iterable[Finding]) -> Table:
    table = Table(title="replaybuf doctor", title_justify="left")
    for column in ("check", "", "seen", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = f"[{_COLOURS[finding.state]}]{finding.state}[/]"
        table.add_row(finding.name, mark, escape(finding.text), escape(finding.way_out))
    return table


def _machine(data_dir: Path) -> Iterator[Finding]:
    supported = sys.version_info >= (3, 11)
    advice = "" if supported else "use Python 3.11 or newer"
    yield Finding("python", "ok" if supported else "fail", platform.python_version(), advice)
    folder = data_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    yield _folder(data_dir, folder)
    yield _disk(folder)


def _folder(data_dir: Path, nearest: Path) -> Finding:
    """Write a file into the data folder, or into its nearest parent: permission bits alone are not enough."""
    seen = str(nearest) if nearest == data_dir.resolve() else f"to be created in {nearest}"
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        advice = "make it writable or choose another --data-dir"
        return Finding("data folder", "fail", f"{seen}: {error.strerror}", advice)
    return Finding("data folder", "ok", seen)


def _disk(folder: Path) -> Finding:
    disk = shutil.disk_usage(folder)
    seen = f"{disk.free / 1e9:.1f} GB free" if disk.free >= 1e9 else f"{disk.free / 1e6:.1f} MB free"
    if disk.free < (needed := least_free_bytes(disk.total)):
        return Finding("disk", "fail", seen, f"free some space: the service needs {needed / 1e6:.1f} MB to start")
    if disk.free <= LOW_DISK_BYTES:
        return Finding("disk", "warn", seen, "free some space: the append-only file grows with every group")
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
        else:
            return Finding("port", "ok", f"{host}:{port} is free")
    if state := _running_service(host, port):
        seen = f"{host}:{port}: a running replaybuf answers, {state}"
        return Finding("port", "ok", seen, "to start a second one, choose another --port (0 = a free port)")
    return Finding(
        "port", "warn", seen, "stop the program that listens there, or choose another --port (0 = a free port)"
    )


def _running_service(host: str, port: int) -> str | None:
    """Return the state of the replaybuf that listens there; None if the port belongs to another program."""
    try:
        answer = httpx.get(f"{url_here(host, port)}/readyz", timeout=READY_TIMEOUT_S, trust_env=False).json()
        return f"{answer['status']}, durability {answer['durability']}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, KeyError):
        return None


def _extras() -> Iterator[Finding]:
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        package = _PACKAGES.get(extra, f"'replaybuf[{extra}]'")
        advice = f"to use it: pip install {package}" if missing else ""
        seen = f"missing: {', '.join(missing)}" if missing else "installed"
        yield Finding(f"extra {extra}", "warn" if missing else "ok", seen, advice)


def _plugins() -> Finding:
    names = plugins.names(plugins.STRATEGIES)
    if not names:
        advice = "install replaybuf as a package; that registers its entry points"
        return Finding("strategies", "fail", "none found", advice)
    broken = []
    for name in names:
        try:
            plugins.load(plugins.STRATEGIES, name)
        except ReplaybufError as error:
            broken.append(error.detail)
    return Finding("strategies", "fail" if broken else "ok", "; ".join(broken) or ", ".join(names))


async def _redis(redis_url: str | None, wait_replicas: int) -> list[Finding]:
    if redis_url is not None:
        return await _examine_store(redis_url, "redis", WritePolicy(replicas=wait_replicas))
    with tempfile.TemporaryDirectory(prefix="replaybuf-doctor-") as scratch:
        server = EmbeddedServer(Path(scratch))
        try:
            await server.start()
        except ReplaybufError as error:
            advice = "use your own server: --redis-url URL"
            return [Finding("embedded valkey", "fail", error.detail, advice)]
        try:
            return await _examine_store(server.url, "embedded valkey")
        finally:
            await server.stop()


async def _examine_store(url: str, name: str, policy: WritePolicy = STRICT) -> list[Finding]:
    try:
        store = await Store.open(url, policy)
    except ReplaybufError as error:
        advice = "start Redis >= 7.0 or Valkey >= 8 there, or correct --redis-url"
        if isinstance(error, (UnsupportedServer, Invalid)):
            advice = "do what it says"
        return [Finding(name, "fail", error.detail, advice)]
    try:
        report = await store.connection.report()
        clock = await _clock(store)
        servers = await _servers(store)
    finally:
        await store.close()
    return [
        Finding(name, "ok", f"{store.connection.url}, {report.name}"),
        _durability(report),
        _replicas(report),
        _memory(report),
        clock,
        servers,
    ]


def _durability(report: ServerReport) -> Finding:
    seen = "; ".join([report.summary, *report.reasons])
    if report.durability != "strict":
        advice = "do what each reason says, in the server's configuration file too; until then a kill loses data"
        return Finding("durability", "warn", seen, advice)
    always = report.met_by.startswith("appendfsync always")
    advice = "" if always else "CONFIG SET appendfsync always: it is faster and survives a crash of the machine"
    return Finding("durability", "ok", seen, advice)


def _replicas(report: ServerReport) -> Finding:
    seen = f"{report.replicas} connected; --wait-replicas makes writes wait for them"
    if report.replicas < report.policy.replicas:
        return Finding("replicas", "fail", seen, "connect more, or wait for fewer: until then no write is confirmed")
    return Finding("replicas", "ok", seen)


def _memory(report: ServerReport) -> Finding:
    limit = f"{report.max_memory_bytes / 1e9:.1f} GB" if report.max_memory_bytes else "no bound"
    seen = f"{report.used_memory_bytes / 1e6:.1f} MB used, {limit}, {report.max_memory_policy}"
    good = report.max_memory_policy in ("noeviction", "unknown")
    return Finding("memory", "ok" if good else "fail", seen, "" if good else "set maxmemory-policy noeviction")


async def _clock(store: Store) -> Finding:
    started = time.time()
    seconds, micros = await store.connection.run(store.connection.client.time())
    middle = (started + time.time()) / 2
    offset_s = seconds + micros / 1e6 - middle
    good = abs(offset_s) < LARGEST_CLOCK_OFFSET_S
    advice = "" if good else "synchronise the clocks (NTP): ticket deadlines are off by this much"
    return Finding("clock", "ok" if good else "warn", f"{round(offset_s * 1000):+} ms against Redis", advice)


async def _servers(store: Store) -> Finding:
    """Compare the releases of the servers that live on this Redis with this installation."""
    living, own = [server for server in await store.servers.read() if server.silent_s <= SILENT_S], name_release()
    others = [f"{server.holder.partition('@')[2]} has {server.release}" for server in living if server.release != own]
    if not others:
        return Finding("servers", "ok", f"{len(living)} live on this Redis, of other releases none")
    advice = "stop all servers of one Redis, install one release, and start them: a server of another one leads no run"
    return Finding("servers", "warn", f"{'; '.join(others)}; release and plug-ins of this one: {own}", advice)
