"""Valkey with two replicas and three sentinels, for the chaos test."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from replaybuf.store.redis.embedded import valkey_binary
from tests.chaos.processes import Child, Valkey
from tests.ports import free_ports
from tests.sentinels import NAME, SETTINGS
from tests.waiting import eventually

START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 1.0
_CUT = "cut"
PRIMARY_SHARE = 0.75
"""Share of the faults on Valkeys that the primary gets: they are failovers."""


class Failover:
    """`url` names all sentinels; the first of `valkeys` is the primary at the start."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(6)
        self.valkeys = [
            Valkey(f"valkey-{number}", folder / f"valkey-{number}", port) for number, port in enumerate(ports[:3], 1)
        ]
        self.sentinels = [_sentinel(folder, number, port, ports[0]) for number, port in enumerate(ports[3:], 1)]
        self._clients = [
            redis.Redis(port=port, socket_timeout=ANSWER_TIMEOUT_S, retry=Retry(NoBackoff(), 0)) for port in ports
        ]
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports[3:])}/{NAME}"

    @property
    def all(self) -> list[Child]:
        """Every process."""
        return [*self.sentinels, *self.valkeys]

    def start(self) -> None:
        """Start the Valkeys, then the sentinels, and wait until they know each other."""
        for valkey in self.valkeys:
            valkey.start()
            valkey.wait_ready()
        for client in self._clients[1:3]:
            client.replicaof("127.0.0.1", str(self.valkeys[0].port))
        eventually(self.whole, START_TIMEOUT_S)
        for sentinel in self.sentinels:
            sentinel.start()
        eventually(lambda: all(_knows_all(client) for client in self._clients[3:]), START_TIMEOUT_S)

    def whole(self) -> bool:
        """Check that one Valkey is the primary, and the others follow it."""
        roles = [role_of(client) for client in self._clients[:3]]
        return sorted(roles) == ["connected", "connected", "master"]

    def cut(self, valkey: Valkey) -> None:
        """Cut a Valkey off from sentinels and other Valkeys, as a broken network does; servers still reach it.

        Their connections are open already. Whoever connects anew lacks the password.
        """
        with valkey.connect() as client:
            client.config_set("requirepass", _CUT)
        with valkey.connect(_CUT) as client:
            numbers = [peer["id"] for peer in client.client_list() if peer["name"].startswith("sentinel-")]
            for number in numbers:
                client.client_kill_filter(_id=number)
            client.client_kill_filter(_type="replica")

    def join(self, valkey: Valkey) -> None:
        """End a cut."""
        with valkey.connect(_CUT) as client:
            client.config_set("requirepass", "")

    def choose(self, rng: random.Random) -> Valkey | None:
        """Choose a Valkey to hurt."""
        roles = [role_of(client) for client in self._clients[:3]]
        primary = rng.random() < PRIMARY_SHARE
        chosen = [valkey for valkey, role in zip(self.valkeys, roles, strict=True) if (role == "master") == primary]
        return rng.choice(chosen) if chosen else None


def _sentinel(folder: Path, number: int, port: int, primary: int) -> Child:
    place = folder / f"sentinel-{number}"
    place.mkdir()
    settings = place / "sentinel.conf"
    settings.write_text(
        SETTINGS.format(port=port, folder=place, name=NAME, primary=primary, quorum=2, down_after_ms=1000)
    )
    return Child(f"sentinel-{number}", "sentinel", [str(valkey_binary()), str(settings), "--sentinel"], folder)


def role_of(client: redis.Redis) -> str:
    """Return "master", or how a replica is connected to one; "" if it does not answer."""
    with contextlib.suppress(redis.RedisError):
        kind, *details = client.role()
        return "master" if kind == b"master" else details[2].decode()
    return ""


def _knows_all(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.RedisError):
        facts: Any = client.sentinel_master(NAME)
        return (facts["num-slaves"], facts["num-other-sentinels"]) == (2, 2)
    return False
