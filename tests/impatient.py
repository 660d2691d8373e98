"""The command line with little patience for Redis, so that tests of a silent one take seconds: `python -m`."""

from __future__ import annotations

import replaybuf.store.redis.connection as connection
from replaybuf.cli.main import main

COMMAND_TIMEOUT_S = 1.0

if __name__ == "__main__":
    connection.COMMAND_TIMEOUT_S = connection.CONNECT_TIMEOUT_S = COMMAND_TIMEOUT_S
    main()
