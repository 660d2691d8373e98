"""The command `replaybuf generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from cyclopts import Parameter

from replaybuf.cli.event_loop import run_async
from replaybuf.generator.options import GenerateOptions
from replaybuf.generator.process import run_generator


def generate(
    options: Annotated[GenerateOptions, Parameter(name="*")],
    *,
    reread: Annotated[Callable[[], dict[str, Any]] | None, Parameter(parse=False)] = None,
) -> None:
    """Generate scored groups of rollouts for a run, until its prompts or steps are finished.

    SIGTERM or SIGINT: groups in flight get 2 s to finish; the other tickets are returned; the process ends within 4 s.
    The exit code is 0 when the run is finished or after a signal, and 1 with a message after an error.
    SIGHUP: the generator reads the file of --config again. It applies max_inflight_groups, min_inflight_groups,
    temperature and report_every_s from the next ticket on. It rejects any other change and logs that.
    """
    options.check()
    run_async(run_generator(options, None if reread is None else lambda: reread()["options"]))
