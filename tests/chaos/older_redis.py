"""Redis that comes back without acknowledged writes: from an older file, or as a promoted replica that lagged."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
import redis

from replaybuf.store import keys
from tests.chaos.cluster import Cluster
from tests.chaos.history import Faulted, Healed, OlderRedis, Recorder, now_s
from tests.chaos.processes import Valkey
from tests.ports import free_port
from tests.waiting import eventually

KINDS = ("older", "lagging")
LAG_TIMEOUT_S = 4.0
"""How long the load may take until some server knows what the copy lacks; else the fault does not happen."""
REPORT_TIMEOUT_S = 15.0
LOAD_S = (0.2, 0.8)
"""How long the load goes on after every server has reported the loss."""
SYNC_TIMEOUT_S = 10.0
_DATA = "appendonlydir"


class Substitution:
    """Puts an older Redis behind the address of the servers for a few seconds, then the right one again.

    Needs a healthy cluster: a server that starts meanwhile cannot know that something is missing.
    """

    def __init__(self, cluster: Cluster, recorder: Recorder, rng: random.Random) -> None:
        self._cluster, self._recorder, self._rng = cluster, recorder, rng
        self._made = 0

    @property
    def possible(self) -> bool:
        """Whether all servers are ready."""
        return all(self._is_ready(url) for url in self._cluster.urls)

    def inject(self, kind: str) -> bool:
        """Let the servers find an older Redis; return False if no copy came to lack something of every run."""
        cluster = self._cluster
        self._made += 1
        older = Valkey(f"{kind}-{self._made}", cluster.folder / f"{kind}-{self._made}")
        try:
            self._start_copy(kind, older)
            before = {run: fingerprint(older, run) for run in cluster.runs}
            copied = {run: newest_group(older, run) for run in cluster.runs}
            if not self._lacks_something(copied):
                return False
            self._serve_older(kind, older, before)
        finally:
            older.kill()
            shutil.rmtree(older.folder)
        return True

    def _serve_older(self, kind: str, older: Valkey, before: dict[str, dict[str, str]]) -> None:
        cluster, recorder, right = self._cluster, self._recorder, self._cluster.valkey
        recorder.write(Faulted(at_s=now_s(), process=right.name, role="valkey", kind=kind))
        right.kill()
        from_s = now_s()
        cluster.point_to(older)
        silent = {url: self._silent_runs(url) for url in cluster.urls}
        _let_load_go_on(self._rng.uniform(*LOAD_S))
        after = {run: fingerprint(older, run) for run in cluster.runs}
        older.kill()
        until_s = now_s()
        cluster.point_to(right)
        right.start()
        right.wait_ready()
        right_s = now_s()
        recorder.write(Healed(at_s=right_s, process=right.name))
        for run in cluster.runs:
            changed = sorted(part for part in before[run] if before[run][part] != after[run][part])
            unaware = [url for url in cluster.urls if run in silent[url]]
            recorder.write(
                OlderRedis(
                    at_s=until_s,
                    run=run,
                    from_s=from_s,
                    right_s=right_s,
                    kind=kind,
                    written=changed,
                    silent=unaware,
                )
            )

    # ------------------------------------------------------------------ the copy

    def _start_copy(self, kind: str, older: Valkey) -> None:
        right = self._cluster.valkey
        if kind == "older":
            shutil.copytree(right.folder / _DATA, older.folder / _DATA)
            older.start()
            older.wait_ready()
            return
        older.start()
        older.wait_ready()
        with right.connect() as primary, older.connect() as replica:
            port = int(primary.config_get("port")["port"]) or free_port()
            primary.config_set("port", port)
            replica.replicaof("127.0.0.1", str(port))
            eventually(lambda: replica.info("replication")["master_link_status"], SYNC_TIMEOUT_S, lambda up: up == "up")
            replica.replicaof("NO", "ONE")  # from here on it lags

    def _lacks_something(self, copied: Mapping[str, int]) -> bool:
        """Wait until some server knows a group of every run that the copy lacks."""
        ends_s = now_s() + LAG_TIMEOUT_S

        def lag() -> bool:
            return all(
                any(self._stored(url, run) > newest for url in self._cluster.urls) for run, newest in copied.items()
            )

        return eventually(lambda: (lag(), now_s() > ends_s), 10 * LAG_TIMEOUT_S, any)[0]

    def _stored(self, url: str, run: str) -> int:
        try:
            return int(_get(f"{url}/v1/runs/{run}")["groups"]["stored"])
        except (httpx.TransportError, KeyError):
            return 0

    # ------------------------------------------------------------------ the servers

    def _is_ready(self, url: str) -> bool:
        try:
            return httpx.get(f"{url}/readyz", timeout=REPORT_TIMEOUT_S).status_code == 200
        except httpx.TransportError:
            return False

    def _silent_runs(self, url: str) -> list[str]:
        """Wait until a server reports lost data of every run, and that it is not ready; return the runs left."""
        ends_s = now_s() + REPORT_TIMEOUT_S

        def left() -> list[str]:
            silent = [run for run in self._cluster.runs if _slug(f"{url}/v1/runs/{run}") != "data-lost"]
            return silent or ([] if not self._is_ready(url) else list(self._cluster.runs))

        return eventually(
            lambda: (left(), now_s() > ends_s), 3 * REPORT_TIMEOUT_S, lambda seen: not seen[0] or seen[1]
        )[0]


def fingerprint(valkey: Valkey, run: str) -> dict[str, str]:
    """Summarise what Redis holds of a run, without leases: a server may take one before it reads anything else."""
    with valkey.connect() as client:
        parts: dict[str, Any] = {
            "index": client.xinfo_stream(keys.index(run))["last-generated-id"],
            "ledger": client.xinfo_stream(keys.ledger(run))["last-generated-id"],
            "ids": client.hlen(keys.group_ids(run)),
            "counts": sorted(client.hgetall(keys.counts(run)).items()),
            "tickets": client.zrange(keys.tickets(run), 0, -1, withscores=True),
            "snapshot": client.get(keys.snapshot(run)),
            "spilled": sorted(client.hgetall(keys.spill(run)).items()),
            "cursors": sorted(client.hgetall(keys.cursors(run)).items()),
            "payloads": _published_payloads(client, run),
        }
    return {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}


def _published_payloads(client: redis.Redis, run: str) -> list[bytes]:
    """List payloads of stored groups; one that waits for its publication still has a lifetime."""
    keys = sorted(client.scan_iter(f"rb:p:{{{run}:*", count=1000))
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.pttl(key)
    return [key for key, left_ms in zip(keys, pipeline.execute(), strict=True) if left_ms == -1]


def newest_group(valkey: Valkey, run: str) -> int:
    """Read the number of the newest group of a run."""
    with valkey.connect() as client:
        last: bytes = client.xinfo_stream(keys.index(run))["last-generated-id"]
    return int(last.partition(b"-")[0])


def _get(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(httpx.get(url, timeout=REPORT_TIMEOUT_S).content)
    return answer


def _slug(url: str) -> str:
    """Return the type of the error that a call gets; "" for none."""
    try:
        return str(_get(url).get("type", "")).rpartition(":")[2]
    except httpx.TransportError:
        return ""


def _let_load_go_on(seconds: float) -> None:
    ends_s = now_s() + seconds
    eventually(now_s, 2 * seconds + 60, lambda now: now > ends_s)
