"""The command line with servers that are trusted with runs soon, so that tests of balance take seconds: `python -m`."""

from __future__ import annotations

import os

from replaybuf.cli.main import main
from replaybuf.service import host
from replaybuf.service.peers import living_servers

STEADY_S, SHARE_PERIOD_S = float(os.environ.get("STEADY_S", "2.0")), 0.3
"""An endless time keeps each run where it is, while the servers know each other."""

if __name__ == "__main__":
    living_servers.STEADY_S = STEADY_S
    setattr(host, "SHARE_PERIOD_S", SHARE_PERIOD_S)  # noqa: B010 - the name is imported there
    main()
