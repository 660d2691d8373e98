"""Durable storage in Redis streams: keys, the function library, the store, the embedded server."""

from replaybuf.store.entries import AppendResult, IndexChunk, IndexEntry, PendingGroup
from replaybuf.store.known_ends import Ends
from replaybuf.store.redis.durability import WritePolicy
from replaybuf.store.redis.embedded import EmbeddedServer, lock_folder
from replaybuf.store.redis.server import ServerReport
from replaybuf.store.runs import HeldLease, Lease
from replaybuf.store.servers import AnnouncedServer
from replaybuf.store.store import Store
from replaybuf.store.tickets import RunTickets

__all__ = [
    "AnnouncedServer",
    "AppendResult",
    "EmbeddedServer",
    "Ends",
    "HeldLease",
    "IndexChunk",
    "IndexEntry",
    "Lease",
    "PendingGroup",
    "RunTickets",
    "ServerReport",
    "Store",
    "WritePolicy",
    "lock_folder",
]
