"""Options of `replaybuf serve`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, Port, PositiveFloat, PositiveInt

from replaybuf.kernel.decide.trimming import KEPT_GROUPS
from replaybuf.store.redis.durability import Level
from replaybuf.wire.config import RUN_NAME

BODY_BUDGET_BYTES = 1 << 30


def check_deployment(_: object, name: str | None) -> None:
    """Raise `ValueError` for a name that is not made like one of a run."""
    if name is not None and not RUN_NAME.fullmatch(name):
        raise ValueError("use 1 to 63 lower-case letters, digits, '.', '_', '-'; begin with a letter or digit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Addresses, storage, access and durability of one server. The docstring of each field is its help text."""

    host: str = "127.0.0.1"
    """Address to listen on. Without a tokens file it must be a loopback address."""
    port: Port = 8900
    """Port to listen on; 0 takes a free port."""
    tcp: bool = True
    """Listen on host and port. With --no-tcp the server listens on the unix socket only."""
    uds: Path | None = None
    """Unix socket to listen on, for the current user only. Clients on this machine connect to unix:PATH."""
    workers: PositiveInt = 1
    """Number of processes that serve together. Each also listens on a port of its own: --port + 1, + 2, ..."""
    data_dir: Path = Path(".replaybuf/data")
    """Data folder: how far each run was acknowledged and, if no Redis URL is set, the data of a private Valkey."""
    redis_url: str | None = dataclasses.field(default=None, repr=False)
    """Redis >= 7.0 or Valkey >= 8 to use: redis://HOST:PORT/DB, rediss://..., unix:///PATH, or the primary that
    Sentinel watches: redis+sentinel://HOST:PORT[,HOST:PORT...]/NAME, or a cluster: redis+cluster://HOST:PORT[,...]."""
    tokens_file: Path | None = None
    """File of bearer tokens; clients must send one of them. "replaybuf tokens new" creates tokens. SIGHUP reads
    the file again."""
    tls_cert: Path | None = None
    """Certificate chain (PEM): listen with TLS. SIGHUP reads it again."""
    tls_key: Path | None = None
    """Key of the certificate (PEM), without a password."""
    advertise_url: str | None = None
    """URL that the other servers report to clients while this server is the leader. Default: the listening address."""
    balance: bool = True
    """Hand runs over to other servers on the same Redis until each leads its share, one run per second at most.
    With --no-balance it hands none over and gets none: it leads what it creates, and runs whose leader has ended."""
    deployment: Annotated[str | None, Parameter(validator=check_deployment)] = None
    """Name of the servers that belong together. The first server to start gives it to the Redis; a server with another
    name, or without one, is then refused. Default: every server may use the Redis."""
    allowed_hosts: Annotated[tuple[str, ...], Parameter(name="allowed-host", consume_multiple=True, negative="")] = ()
    """More names of this server, HOST or HOST:PORT: clients may use them in URLs, and pages of these hosts may call it.
    Needed for names of a proxy or of a container."""
    history_groups: NonNegativeInt = KEPT_GROUPS
    """Number of freed groups per run that the service still reports, with the records of their batches."""
    max_connections: PositiveInt = 8192
    """Maximum number of open connections. A new one takes the place of one without a complete request, or else of an
    idle one. The limit of open files may lower it."""
    max_half_heads: NonNegativeInt = 64
    """Maximum number of connections of one address that have sent no complete request head for half a second; 0 = no
    maximum, for a proxy that forwards incomplete requests."""
    max_head_bytes: PositiveInt = 1 << 16
    """Maximum bytes of a request line with its headers; above it the server answers 431."""
    head_timeout_s: PositiveFloat = 10.0
    """Maximum time until a request head is complete, in seconds; after that the server answers 408."""
    body_timeout_s: PositiveFloat = 30.0
    """Time over which a request body must bring its minimum of bytes, in seconds; otherwise the server answers 408."""
    min_body_bytes_per_s: PositiveInt = 1024
    """Minimum rate of a request body, over --body-timeout-s, in bytes per second."""
    body_budget_bytes: PositiveInt = BODY_BUDGET_BYTES
    """Maximum bytes of request bodies in memory, over all connections. A call without room waits up to 5 s, then it
    is answered 503."""
    durability: Level = "strict"
    """Durability of acknowledged writes. strict: they survive kill -9 of any process; relaxed: the last second may be
    lost."""
    wait_replicas: int = 0
    """Number of Redis replicas that must confirm a write before the server acknowledges it."""
    wait_timeout_s: float = 2.0
    """Maximum time to wait until a write is confirmed, in seconds; after that the server answers 503 not-durable."""
    push_metrics: str | None = dataclasses.field(default=None, repr=False)
    """Server to push the metrics to: http://HOST:PORT of a Prometheus Pushgateway, otlp+http://HOST:4318 of an
    OpenTelemetry collector."""
    push_metrics_every_s: PositiveFloat = 15.0
    """Time between two pushes, in seconds."""
    tokenizer: Path | None = None
    """Model folder with tokenizer.json; the server uses it to show groups as text."""
