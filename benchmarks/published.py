"""Groups put straight into the index, by the library's own function: filling is not what is measured."""

from __future__ import annotations

from typing import Any

import numpy as np
from groups import random_group

from replaybuf.kernel.rows.index import ENTRY, encode_entry
from replaybuf.store import Store, keys
from replaybuf.store.entries import EntryStrings, encode_strings
from replaybuf.wire.frame import encode_frame, stored_checksum

DISTINCT = 64
PUBLISHED_AT_ONCE = 1_000


async def publish(
    store: Store, run: str, count: int, *, rollouts: int = 1, mean_tokens: int = 160, longest: int = 160
) -> None:
    """Publish live groups of tickets, with `DISTINCT` different contents."""
    rng = np.random.default_rng(0)
    made = [random_group(rng, n, rollouts=rollouts, mean_tokens=mean_tokens, longest=longest) for n in range(DISTINCT)]
    frames = [encode_frame(group) for group in made]
    own = [encode_entry(group, len(f), stored_checksum(f), 0, 0.0) for group, f in zip(made, frames, strict=True)]
    templates = np.frombuffer(b"".join(own), ENTRY)
    lengths = [group.lengths.astype("<i4").tobytes() for group in made]
    done = keys.prompts_done(run, "")
    for start in range(0, count, PUBLISHED_AT_ONCE):
        numbers = np.arange(start, min(start + PUBLISHED_AT_ONCE, count))
        entries = templates[numbers % DISTINCT]
        entries["prompt_index"] = numbers
        pipe = store.connection.pipeline()
        names = [keys.deleted(run)]
        arguments: list[Any] = []
        for n, entry in zip(numbers.tolist(), entries, strict=True):
            k, name = n % DISTINCT, f"p{n}"
            payload = keys.payload(run, name)
            pipe.execute_command("SET", payload, frames[k], "EX", keys.ORPHAN_TTL_S)
            strings = encode_strings(EntryStrings(name, f"task/{n}", "", payload, f"t0-{n}-1", lengths[k]))
            names += [done, done, payload]
            arguments += [name, name, entry.tobytes(), strings, n, n]
        pipe.execute_command(*store.connection.words_of(run, "rb_publish", names, arguments))
        *_, reply = await store.connection.run(pipe.execute())
        store.connection.check_reply(run, "", reply)
