"""Several inference engines used as one: health checks, load balancing, retries and weight versions."""

from replaybuf.generator.fleet.fleet import BEHIND, RETRY_PAUSE_S, TRIES, Fleet, stale_fault
from replaybuf.generator.fleet.member import ServerStatus
from replaybuf.generator.fleet.publication import OnPublish

__all__ = ["BEHIND", "RETRY_PAUSE_S", "TRIES", "Fleet", "OnPublish", "ServerStatus", "stale_fault"]
