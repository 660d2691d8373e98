"""Durable storage in Redis streams: keys, the function library, the store, the embedded server."""

from replaybuf.store.durability import Wanted
from replaybuf.store.embedded import EmbeddedServer
from replaybuf.store.entries import IndexChunk, IndexEntry
from replaybuf.store.groups import Appended, ToAppend
from replaybuf.store.leases import Lease
from replaybuf.store.ledger import Ends
from replaybuf.store.redis import Store
from replaybuf.store.server import ServerReport
from replaybuf.store.tickets import Book

__all__ = [
    "Appended",
    "Book",
    "EmbeddedServer",
    "Ends",
    "IndexChunk",
    "IndexEntry",
    "Lease",
    "ServerReport",
    "Store",
    "ToAppend",
    "Wanted",
]
