"""Direct mode: a rank requests only the plan of its body from the service, and fetches the frames from Redis.

For clusters where one HTTP process cannot send all bodies. The function of the service builds the body, from frames
that fit the checksums of the plan, so the bytes are the same. If that fails (Redis unavailable, a frame missing or
broken, a service of another release), the reason is logged and the body comes over HTTP.

Redis is only read, with GET on payload keys (`rb:p:*`): ask the operator for a user with no other rights. Frames in the
spill folder of the run are read there; a rank that cannot reach the folder gets its bodies over HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from replaybuf.client.http_client import HttpClient
from replaybuf.errors import BrokenFrame, Invalid, Malformed, MissingExtra, ServiceUnavailable, SpillAway
from replaybuf.store.chunks import READ_BYTES, split_chunks
from replaybuf.store.redis.topology import open_reader
from replaybuf.store.spill_folder import SpillFolder, open_folder
from replaybuf.version import __version__
from replaybuf.wire.contract import WaitingAnswer
from replaybuf.wire.frame import stored_checksum
from replaybuf.wire.group import Group
from replaybuf.wire.plan import Body, Plan, PlannedGroup, build_body, decode_late, decode_payload
from replaybuf.wire.spill import check_spill_url, stub_path

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
HTTP_ONLY_S = 30.0
"""How long bodies come over HTTP after Redis could not be reached."""


class DirectBodies:
    """Fetches bodies of the run of `client` from Redis, for one thread. Close it after use.

    `built` counts bodies built from Redis, `fallbacks` those that came over HTTP.
    """

    def __init__(self, client: HttpClient, redis_url: str) -> None:
        self.built = 0
        self.fallbacks = 0
        self._client = client
        self._http_until_s = 0.0
        self._folder: SpillFolder | None = None
        try:
            self._redis = open_reader(
                redis_url,
                socket_timeout=COMMAND_TIMEOUT_S,
                socket_read_size=READ_BYTES,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
            )
        except ValueError as error:  # without the URL: it may hold a password
            raise Invalid(f"redis_url is not a Redis URL: {error}", name="redis_url") from None
        except RedisError as error:  # the client of a cluster asks for its nodes at once
            raise ServiceUnavailable(f"Redis cannot be reached: {error}", name="redis_url") from error

    def close(self) -> None:
        """Close the connections to Redis; the client stays open."""
        self._redis.close()

    def fetch(self, step: int, epoch: int, dp_rank: int = 0, wait_ms: int = 0) -> Body | WaitingAnswer:
        """Return the batch body of one rank, with the same result and errors as `Client.fetch_batch`."""
        if time.monotonic() >= self._http_until_s:
            try:
                plan = self._client.fetch_plan(step, epoch, dp_rank, wait_ms=wait_ms)
                if isinstance(plan, WaitingAnswer):
                    return plan
                built = self.build(plan)
            except Malformed as error:
                logger.warning("body of step %d rank %d comes over HTTP: %s", step, dp_rank, error.detail)
            except (RedisError, OSError) as error:
                self._use_http(f"Redis: {error or type(error).__name__}")
            except (SpillAway, MissingExtra) as error:
                self._use_http(error.detail)
            else:
                self.built += 1
                return built
        body = self._client.fetch_batch(step, epoch, dp_rank, wait_ms=wait_ms)
        self.fallbacks += not isinstance(body, WaitingAnswer)
        return body

    def _use_http(self, why: str) -> None:
        self._http_until_s = time.monotonic() + HTTP_ONLY_S
        logger.warning("bodies come over HTTP for %.0f s: %s", HTTP_ONLY_S, why)

    def build(self, plan: Plan) -> memoryview:
        """Fetch the frames of a plan and build its body.

        Raises `BrokenFrame` for a missing frame or another one than planned, `Malformed` for a plan of another release,
        `SpillAway` for a spill folder out of reach, and redis-py's errors.
        """
        if plan.release != __version__:
            raise Malformed(
                f"the service has release {plan.release} and this client {__version__}; their bodies may differ",
                name="release",
                value=plan.release,
                bound=__version__,
            )
        return build_body(plan, self._groups(plan))

    def _groups(self, plan: Plan) -> list[Group]:
        groups: list[Group] = []
        for chunk in split_chunks(plan.groups, _frame_bytes):
            pipe = self._redis.pipeline(transaction=False)
            for planned in chunk:
                for key in (planned.payload_key, *(column.payload_key for column in planned.late_columns or ())):
                    pipe.get(key)
            frames = (self._frame(plan.meta.run, payload) for payload in pipe.execute())
            groups += [_decode(planned, frames) for planned in chunk]
        return groups

    def _frame(self, run: str, payload: bytes | None) -> bytes | None:
        """Return a frame, from the spill folder if the payload is its stub."""
        path = stub_path(run, payload)
        if path is None:
            return payload
        if self._folder is None:
            spill = self._client.get_run().config["spill"]
            self._folder = open_folder(check_spill_url(spill["url"]))
        return self._folder.read(path)


def _frame_bytes(planned: PlannedGroup) -> int:
    return planned.frame_bytes + sum(column.frame_bytes for column in planned.late_columns or ())


def _decode(planned: PlannedGroup, frames: Iterator[bytes | None]) -> Group:
    """Decode a group from its frame and those of its late columns, which come next."""
    group = decode_payload(planned.payload_key, next(frames), planned.crc32c)
    late = {column.name: next(frames) for column in planned.late_columns or ()}
    for column in planned.late_columns or ():
        frame = late[column.name]
        if frame is not None and stored_checksum(frame) != column.crc32c:
            raise BrokenFrame(f"payload {column.payload_key} is not the frame of the plan", name="bad_checksum")
    return decode_late(group, late, planned.payload_key)
