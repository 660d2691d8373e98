"""Push of metrics to a Prometheus Pushgateway or an OpenTelemetry collector, for processes that nobody can scrape.

=========  ==============================================================
`pusher`   pushes at an interval, in a thread of its own; target: Pushgateway
`otlp`     target: OpenTelemetry collector, by OTLP/HTTP
=========  ==============================================================
"""

from __future__ import annotations

from replaybuf.metric_push.pusher import Identity, Pusher

__all__ = ["Identity", "Pusher"]
