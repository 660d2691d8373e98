"""The command `replaybuf generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from cyclopts import Parameter

from replaybuf.cli.event_loop import run_async
from replaybuf.generator.options import GenerateOptions
from replaybuf.generator.process import run_generator


def generate(
    run: Annotated[str | None, Parameter(help="Name of the run; the generator waits until the run exists.")] = None,
    /,
    *,
    options: Annotated[GenerateOptions, Parameter(name="*")],
    reread: Annotated[Callable[[], dict[str, Any]] | None, Parameter(parse=False)] = None,
) -> None:
    """Generate scored groups of rollouts for a run, until its prompts or steps are finished.

    On SIGTERM or SIGINT, groups in flight get 2 s to finish. The generator returns all other tickets and ends within
    4 s. The exit code is 0 after a signal or when the run is finished, and 1 after an error.

    On SIGHUP, the generator reads the --config file again. It applies new values of max_inflight_groups,
    min_inflight_groups, temperature and report_every_s to the next tickets. If another option changed, it applies
    nothing and logs an error.
    """
    del run  # also the value of --run, see `replaybuf.cli.configuration`
    options.check()
    run_async(run_generator(options, None if reread is None else lambda: reread()["options"]))
