"""The command `replaybuf stage`."""

from __future__ import annotations

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from replaybuf.cli.event_loop import run_async
from replaybuf.cli.service import RunName
from replaybuf.client import Client
from replaybuf.generator.failure.last_failure import report_failure
from replaybuf.generator.options import default_producer
from replaybuf.generator.stage.stage_daemon import StageDaemon, load_compute
from replaybuf.logs import announce
from replaybuf.wire.late_columns import check_name

RETRY_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOptions:
    """What to add, and to which service."""

    column: str
    """Column to add: ref_logprobs, old_logprobs, teacher_logprobs, token_advantages, rewards, advantages or
    rewards.NAME."""
    function: str | None = None
    """Function MODULE:NAME that gets a stored group and returns one list per rollout, or one number per rollout."""
    model: Path | None = None
    """Model folder that computes logprobs in this process with torch; use it instead of --function."""
    url: str = "http://127.0.0.1:8900"
    """Address of the service; separate several servers of one Redis by commas."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """Bearer token with the role producer."""


def stage(run: RunName, /, options: Annotated[StageOptions, Parameter(name="*")]) -> None:
    """Add a column to every stored group that lacks it, until the run is finished.

    Several stages may add the same column. A stage that was killed continues with the groups that lack the column. On
    SIGTERM or SIGINT it ends at once, with exit code 0. A failure that ends it is reported to the service.
    """
    check_name(options.column)
    try:
        _add_columns(run, options)
    except Exception as error:
        producer = f"stage-{options.column}-{default_producer()}"
        run_async(report_failure(options.url, run, options.token, producer, error))
        raise


def _add_columns(run: str, options: StageOptions) -> None:
    compute = load_compute(options.function, options.model)
    stop, errors = threading.Event(), list[Exception]()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    client = Client(options.url, run, token=options.token, retry_for_s=RETRY_S)
    daemon = StageDaemon(client, options.column, compute, stop)

    def work() -> None:
        try:
            daemon.run()
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            errors.append(error)
        stop.set()

    # In a daemon thread: a function that hangs does not keep the process. A call cut short is repeated without harm.
    threading.Thread(target=work, name="stage", daemon=True).start()
    announce("stage adds %s to groups of %s at %s", options.column, run, options.url)
    stop.wait()
    if errors:
        raise errors[0]
    announce("added %d, passed %d, failed %d", daemon.added, daemon.passed, daemon.failed)
