"""OpenTelemetry spans from a ticket to the ack of its group. Off by default: `spans` then does nothing."""
