"""OpenTelemetry spans from a ticket to the ack of its group. Off by default: `spans` then does nothing."""

from collections.abc import Mapping
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool
"""Value of an attribute of a span."""
Headers: TypeAlias = Mapping[str, str]
"""HTTP headers that carry a trace."""
