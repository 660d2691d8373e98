"""The command `replaybuf serve`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from replaybuf.cli.event_loop import run_async
from replaybuf.service.options import ServeOptions

_DEFAULTS = ServeOptions()


def serve(options: Annotated[ServeOptions, Parameter(name="*")] = _DEFAULTS) -> None:
    """Run the service until SIGTERM or SIGINT.

    Prints "listening on http://HOST:PORT" and "listening on unix:PATH" when it accepts requests.
    """
    from replaybuf.service import workers  # takes 0.3 s, and the help does not need it

    run_async(workers.serve(options))
