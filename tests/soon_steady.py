"""The command line with servers that are trusted with runs soon, so that tests of balance take seconds: `python -m`."""

from __future__ import annotations

import os

from replaybuf.cli.main import main
from replaybuf.service import host, leadership
from replaybuf.service.peers import living_servers
from replaybuf.service.run import lease_timer

STEADY_S, SHARE_PERIOD_S = float(os.environ.get("STEADY_S", "2.0")), 0.3
"""An endless time keeps each run where it is, while the servers know each other."""
LEASE_S = float(os.environ.get("LEASE_S", lease_timer.LEASE_S))
"""A long lease keeps the lead of a server that a busy machine lets stand still."""

if __name__ == "__main__":
    living_servers.STEADY_S = STEADY_S
    for module, name, value in (
        (host, "SHARE_PERIOD_S", SHARE_PERIOD_S),
        (host, "LEASE_S", LEASE_S),
        (leadership, "LEASE_S", LEASE_S),
    ):
        setattr(module, name, value)
    main()
