"""Several inference engines used as one: health checks, load balancing, retries and weight versions."""

from replaybuf.generator.fleet.fleet import RETRY_PAUSE_S, TRIES, Fleet
from replaybuf.generator.fleet.member import BEHIND, ServerStatus, stale_fault
from replaybuf.generator.fleet.publication import OnPublish

__all__ = ["BEHIND", "RETRY_PAUSE_S", "TRIES", "Fleet", "OnPublish", "ServerStatus", "stale_fault"]
