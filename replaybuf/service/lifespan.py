"""Start and stop of a service, with its Redis and its background work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from replaybuf.errors import Invalid
from replaybuf.service.host import Service
from replaybuf.service.options import ServeOptions
from replaybuf.service.turns import running_beside
from replaybuf.store import EmbeddedServer, Store, WritePolicy, lock_folder
from replaybuf.wire.text.model_tokenizer import Tokenizer


@contextlib.asynccontextmanager
async def run_service(options: ServeOptions, url: str) -> AsyncIterator[Service]:
    """Start a service that answers at `url`, with its Redis and its background work; stop all of it in order.

    Raises `ServiceUnavailable`, `UnsupportedServer` or `Conflict` if Redis or the data folder cannot be used, `Invalid`
    for impossible options, `MissingExtra` for a tokenizer without its library.
    """
    policy = WritePolicy(options.durability, options.wait_replicas, options.wait_timeout_s)
    if not options.redis_url and policy.replicas:
        detail = f"wait_replicas is {policy.replicas}; the embedded Valkey has no replicas; set --redis-url"
        raise Invalid(detail, name="wait_replicas", value=policy.replicas, bound=0)
    tokenizer = await asyncio.to_thread(Tokenizer, options.tokenizer) if options.tokenizer else None
    server = None if options.redis_url else EmbeddedServer(options.data_dir, options.durability)
    if server:
        await server.start()
    store = lock = None
    try:
        if server:
            store = await Store.open(server.url, policy, private=True, explain_outage=lambda: server.outage)
        else:
            store = await Store.open(str(options.redis_url), policy)
            await store.servers.claim(options.deployment)
        if policy.level == "strict":
            ends = options.data_dir / "acknowledged"
            with contextlib.suppress(OSError):  # of a folder that cannot be used: `load` logs it
                ends.mkdir(parents=True, exist_ok=True)
                lock = lock_folder(ends)
            store.connection.known.load(ends)
        service = Service(
            store,
            url=options.advertise_url or url,
            embedded=server is not None,
            history_groups=options.history_groups,
            tokenizer=tokenizer,
            balance=options.balance,
        )
        await service.start()
        async with running_beside({"embedded": server.watch()}) if server else contextlib.nullcontext():
            try:
                async with service.working():
                    yield service
            finally:
                await service.stop()
    finally:
        if store:
            await store.close()
        if server:
            await server.stop()
        if lock:
            lock.close()
