"""The command `replaybuf stage`."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from replaybuf.cli.event_loop import run_async
from replaybuf.cli.service import RunName, ServiceOptions, print_json
from replaybuf.client import AsyncClient
from replaybuf.errors import Invalid
from replaybuf.generator.failures import report_failure
from replaybuf.generator.options import default_producer
from replaybuf.generator.preflight import check_least
from replaybuf.generator.stage.local import LocalStage, open_function, open_model
from replaybuf.generator.stage.stage_daemon import StageDaemon
from replaybuf.logs import announce
from replaybuf.wire.late_columns import check_name

RETRY_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOptions(ServiceOptions):
    """What to add, and to which service."""

    column: str
    """Column to add: ref_logprobs, old_logprobs, teacher_logprobs, token_advantages, rewards, advantages or
    rewards.NAME."""
    function: str | None = None
    """Function MODULE:NAME that gets a stored group and returns one list per rollout, or one number per rollout."""
    model: Path | None = None
    """Model folder that computes logprobs in this process with torch; use it instead of --function."""
    micro_batch: int = 8
    """Rollouts per call of the model, over several groups."""
    timeout_s: float = 600.0
    """Maximum time of one call of the function or model; a longer one ends the stage."""

    async def open(self) -> LocalStage:
        """Load the function or the model. Raises `Invalid`."""
        check_least("micro_batch", self.micro_batch, 1)
        if self.function is not None and self.model is None:
            return open_function(self.column, self.function, self.timeout_s)
        if self.model is not None and self.function is None:
            return await open_model(self.column, self.model, self.micro_batch, self.timeout_s)
        raise Invalid("set one of function and model", name="function", value=self.function, bound="MODULE:NAME")


def stage(run: RunName, /, options: Annotated[StageOptions, Parameter(name="*")]) -> None:
    """Add a column to every stored group that lacks it, until the run is finished.

    Several stages may add the same column. A stage that was killed continues with the groups that lack the column. On
    SIGTERM or SIGINT it ends at once, with exit code 0. A group that fails three times, and a failure that ends the
    stage, are reported to the service.
    """
    check_name(options.column)
    run_async(_add_columns(run, options, f"stage-{options.column}-{default_producer()}"))


async def _add_columns(run: str, options: StageOptions, producer: str) -> None:
    try:
        async with AsyncClient(options.url, run, token=options.token, retry_for_s=RETRY_S) as client:
            daemon = StageDaemon(client, await options.open(), producer)
            working = asyncio.ensure_future(daemon.run())
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, working.cancel)
            if not options.json:
                announce("stage adds %s to groups of %s at %s", options.column, run, options.url)
            await asyncio.wait([working])
            if not working.cancelled():
                working.result()
    except Exception as error:
        await report_failure(options.url, run, options.token, producer, error)
        raise
    counts = {"added": daemon.added, "passed": daemon.passed, "failed": daemon.failed, "given_up": daemon.given_up}
    if options.json:
        print_json(counts)
    else:
        announce("added %d, passed %d, failed %d, gave up %d", *counts.values())
