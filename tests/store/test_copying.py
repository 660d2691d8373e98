"""Writes of a restore."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from replaybuf.backup import target
from replaybuf.backup.section import MomentSection, PayloadsSection, PromptsSection, Section
from replaybuf.store import EmbeddedServer, Store, keys
from replaybuf.store.copying import EPOCH_BASE, FIELDS_AT_ONCE, STAGED_S, Moment, Restore
from replaybuf.wire.ledger import EPOCHS_OF_RESTORE


def test_a_restored_hash_has_more_fields_than_one_command_takes(server: EmbeddedServer) -> None:
    """A function passes at most about 8,000 words to a command."""

    async def main() -> None:
        store, restore = await Store.open(server.url), Restore("wide", "restore:me", 60.0)
        try:
            await store.runs.take_lease(restore.run, restore.holder, restore.lease_s)
            fields = {b"%d" % number: b"1" for number in range(2 * FIELDS_AT_ONCE + 5_000)}
            await store.copying.write_hash(restore, keys.group_ids(restore.run), fields)
            client = store.connection.client
            assert await client.hgetall(keys.group_ids(restore.run)) == fields
            assert await client.ttl(keys.group_ids(restore.run)) > 0
        finally:
            await store.close()

    asyncio.run(main())


def test_a_long_restore_keeps_what_it_wrote_first(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is written once; all get their full lifetime again while the restore goes on."""
    monkeypatch.setattr(target, "EXTEND_AFTER_S", 0.0)
    run, nearly_over_s = "long", 100
    counts = {b"stored": b"1", b"entries": b"1", b"next:": b"1"}
    moment = Moment(counts=counts, tickets=[], cursors={}, snapshot=b"state", fence=b"7", spill_url=None)
    early: list[Section] = [MomentSection(moment), PromptsSection("", b"\x80"), PayloadsSection({"g}:1": b"frame"})]

    async def main() -> None:
        store = await Store.open(server.url)
        client = store.connection.client
        try:
            async with target.open_target(store, run) as restored:
                for section in early:
                    await restored.add(section)
                names = [keys.counts(run), keys.snapshot(run), keys.fence(run), keys.prompts_done(run, "")]
                names.append(keys.named_payload(run, "g}:1"))
                for name in names:
                    assert await client.expire(name, nearly_over_s)
                await restored.add(PayloadsSection({"g}:2": b"frame"}))
                assert min([await client.ttl(name) for name in names]) > STAGED_S / 2
        finally:
            await store.close()

    asyncio.run(main())


def test_a_restore_keeps_no_prompt_of_a_killed_restore(server: EmbeddedServer) -> None:
    """That one was of a newer backup. Its trimmed prompts would make groups of new prompts duplicates for ever."""
    run, counts = "older", {b"stored": b"1", b"entries": b"1", b"next:": b"1"}
    moment = Moment(counts=counts, tickets=[], cursors={}, snapshot=None, fence=b"7", spill_url=None)

    async def main() -> None:
        store = await Store.open(server.url)
        try:
            async with target.open_target(store, run) as killed:
                await killed.add(MomentSection(moment))
                await killed.add(PromptsSection("", b"\x80"))
            async with target.open_target(store, run) as restored:
                await restored.add(MomentSection(moment))
                await restored.finish()
            assert await store.copying.read_value(keys.prompts_done(run, "")) is None
        finally:
            await store.close()

    asyncio.run(main())


def test_each_restore_of_a_restored_run_begins_epochs_above_those_of_the_one_before(server: EmbeddedServer) -> None:
    """Its backup may have any epoch of the restore before."""

    async def main() -> None:
        store, bases = await Store.open(server.url), [0]
        try:
            for number in range(3):
                counts = {b"entries": b"1", EPOCH_BASE.encode(): b"%d" % bases[-1]}
                moment = Moment(counts=counts, tickets=[], cursors={}, snapshot=None, fence=b"7", spill_url=None)
                async with target.open_target(store, f"chain-{number}") as restored:
                    await restored.add(MomentSection(moment))
                bases.append((await store.counters.read(f"chain-{number}"))[EPOCH_BASE])
        finally:
            await store.close()
        assert all(later >= earlier + EPOCHS_OF_RESTORE for earlier, later in itertools.pairwise(bases))
        assert all(base % EPOCHS_OF_RESTORE == 0 for base in bases)

    asyncio.run(main())
