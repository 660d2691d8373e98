"""Payloads of a cluster that nobody would ever delete: neither the index nor the note of an attempt names them."""

from __future__ import annotations

from replaybuf.store import keys
from tests.simulation.redis_model.cluster import RedisCluster


def find_orphans(redis: object, run: str) -> list[str]:
    """Return a line for each such payload of a run; late columns end with the key of their payload."""
    if not isinstance(redis, RedisCluster):
        return []  # there payloads have a lifetime until they are published
    held = {
        key: value for number in redis.layout.primaries for key, (value, _) in redis.nodes[number].values.copy().items()
    }
    index, old = held.get(keys.index(run).encode(), []), held.get(keys.old_entries(run).encode(), {})
    named = b" ".join([*(part for _, fields in index for part in fields), *old.values()])
    noted = b" ".join(
        attempt for bucket in range(keys.BUCKETS) for attempt in held.get(keys.attempts(run, bucket).encode(), ())
    )
    prefix = keys.payload_prefixes(run)[1].encode()
    payloads = sorted(key for key in held if key.startswith(prefix))
    return [
        f"nothing names the payload {key.decode()}"
        for key in payloads
        if not any(name in named or name in noted for name in (key, key.rpartition(b":")[0]))
    ]
