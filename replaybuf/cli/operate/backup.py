"""The commands `replaybuf backup` and `replaybuf restore`."""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from replaybuf.backup.archive import ArchiveWriter, Manifest, read_manifest, read_sections
from replaybuf.backup.section import Summary
from replaybuf.backup.source import Report, Source
from replaybuf.backup.target import open_target
from replaybuf.cli.event_loop import run_async
from replaybuf.cli.service import RunName, print_json
from replaybuf.errors import counted
from replaybuf.launch.view import work_bar
from replaybuf.store import Store
from replaybuf.store.redis.embedded import embedded_url
from replaybuf.store.redis.topology import is_redis_url


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Redis of a service."""

    redis_url: Annotated[str | None, Parameter(env_var="REPLAYBUF_REDIS_URL")] = dataclasses.field(
        default=None, repr=False
    )
    """Redis of the service. Default: the private Valkey of a running `replaybuf serve`."""
    data_dir: Path = Path(".replaybuf/data")
    """Data folder of that `replaybuf serve`."""
    json: bool = False
    """Print JSON."""

    @property
    def url(self) -> str:
        """Address of the Redis. Raises `ServiceUnavailable` if no private Valkey runs on the data folder."""
        return self.redis_url or embedded_url(self.data_dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackupOptions(StorageOptions):
    """Place of a backup."""

    to: str
    """File to create, or the URL of another Redis: redis://HOST:PORT/DB, redis+sentinel://HOST:PORT/NAME."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreOptions(StorageOptions):
    """File of a backup."""

    from_: Annotated[Path, Parameter(name="--from")]
    """File that `replaybuf backup` wrote."""
    check: bool = False
    """Check the file by its digests and restore nothing."""


def backup(run: RunName, /, options: Annotated[BackupOptions, Parameter(name="*")]) -> None:
    """Copy a run to a file or to another Redis, while it is live."""
    with work_bar(f"copying {run}") as report:
        work = _copy_to_redis if is_redis_url(options.to) else _copy_to_file
        summary, digest = run_async(work(run, options, report))
    _print(summary, digest, options.json)


def restore(options: Annotated[RestoreOptions, Parameter(name="*")]) -> None:
    """Bring a run back from a backup file. The Redis must not hold a run of its name."""
    manifest = read_manifest(options.from_)
    if options.check:
        for _ in read_sections(options.from_, manifest):
            pass
    else:
        with work_bar(f"restoring {manifest.summary.run}") as report:
            run_async(_restore(options, manifest, report))
    _print(manifest.summary, manifest.digest, options.json)


async def _copy_to_file(run: str, options: BackupOptions, report: Report) -> tuple[Summary, str]:
    async with AsyncExitStack() as stack:
        store = await _open(stack, options.url)
        archive = stack.enter_context(ArchiveWriter(Path(options.to)))
        summary = await Source(store, run, archive, report).copy()
        return summary, archive.finish(summary).digest


async def _copy_to_redis(run: str, options: BackupOptions, report: Report) -> tuple[Summary, str]:
    async with AsyncExitStack() as stack:
        source, other = await _open(stack, options.url), await _open(stack, options.to)
        target = await stack.enter_async_context(open_target(other, run))
        summary = await Source(source, run, target, report).copy()
        await target.finish()
        return summary, ""


async def _restore(options: RestoreOptions, manifest: Manifest, report: Report) -> None:
    async with AsyncExitStack() as stack:
        store = await _open(stack, options.url)
        target = await stack.enter_async_context(open_target(store, manifest.summary.run))
        for number, section in enumerate(read_sections(options.from_, manifest)):
            report(number, len(manifest.sections))
            await target.add(section)
        await target.finish()


async def _open(stack: AsyncExitStack, url: str) -> Store:
    store = await Store.open(url)
    stack.push_async_callback(store.close)
    return store


def _print(summary: Summary, digest: str, as_json: bool) -> None:
    if as_json:
        print_json({"digest": digest or None, "summary": summary})
        return
    print(
        f"run {summary.run}: {counted(summary.stored, 'group')} stored, ledger up to entry {summary.entries}, "
        f"{counted(summary.payloads, 'payload')} with {summary.payload_bytes / 1e6:.1f} MB"
        + (f", {counted(summary.missing, 'payload')} missing" if summary.missing else "")
        + (f", digest {digest[:16]}" if digest else "")
    )
