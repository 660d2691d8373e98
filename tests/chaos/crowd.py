"""Append thousands of groups at once, which become too stale together: `python -m tests.chaos.crowd`.

They need no ticket, so a strategy grants no more tickets until the groups are used or evicted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from replaybuf.client.client import Client
from replaybuf.wire.contract import AppendResult
from tests.chaos.calling import TIMEOUT_S, load_options, observed
from tests.chaos.content import make_group
from tests.chaos.history import GroupSent, Recorder, now_s

GROUPS, PER_CALL = 2000, 100
RETRY_FOR_S = 8.0
WORK_S = 10.0


def append_crowd(client: Client, run: str, name: str, recorder: Recorder) -> None:
    """Append groups with the version that is published at the start."""
    state = observed(run, client, client.get_run).result
    if state is None:
        return  # the service is away
    ends_s = now_s() + WORK_S
    for start in range(0, GROUPS, PER_CALL):
        if now_s() > ends_s:
            return  # enough of them on a busy machine
        groups = [
            make_group(f"{name}-{os.getpid()}-{number}", state.published_version, named=True)
            for number in range(start, start + PER_CALL)
        ]
        done = observed(run, client, lambda groups=groups: client.append(groups))  # type: ignore[misc]
        results: Sequence[AppendResult | None] = done.result or [None] * len(groups)
        for group, result in zip(groups, results, strict=True):
            seen = done.seen | ({"outcome": result.status} if result else {})
            recorder.write(
                GroupSent(
                    **seen,
                    group_id=str(group.group_id),
                    prompt_index=None,
                    policy_version=group.policy_version,
                    reason=result.reason if result else None,
                )
            )


def main() -> None:
    """Read the command line and append."""
    options = load_options()
    recorder = Recorder(options.history, options.name)
    with Client(options.url, options.run, timeout_s=2 * TIMEOUT_S, retry_for_s=RETRY_FOR_S) as client:
        append_crowd(client, options.run, options.name, recorder)
    recorder.close()


if __name__ == "__main__":
    main()
