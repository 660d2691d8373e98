"""Durable storage in Redis streams: keys, the function library, the store, the embedded server."""

from replaybuf.store.durability import Wanted
from replaybuf.store.embedded import EmbeddedServer
from replaybuf.store.entries import IndexChunk, IndexEntry
from replaybuf.store.redis import Appended, Ends, Lease, ServerReport, Store

__all__ = ["Appended", "EmbeddedServer", "Ends", "IndexChunk", "IndexEntry", "Lease", "ServerReport", "Store", "Wanted"]
