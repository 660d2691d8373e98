"""One chaos run from start to verdict."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from replaybuf.client.client import Client
from tests.chaos.checker import check
from tests.chaos.cluster import Cluster, Topology
from tests.chaos.faults import NOT_IN_FAILOVERS, WEIGHTS, Faults
from tests.chaos.history import Recorder, now_s, read_history
from tests.chaos.observer import Follower, Observer
from tests.chaos.report import Report, build, show
from tests.chaos.rest import Rest, fold
from tests.waiting import eventually

WARM_UP_TIMEOUT_S = 60.0
WARM_UP_STEPS = 3
END_TIMEOUT_S = 25.0
TAKEN = "ledger entry is taken"
"""In the log of a server that found another record at the number of its own."""


def chaos(
    kills: int,
    seed: int,
    time_limit_s: float,
    runs: Sequence[str],
    folder: Path | None,
    console: Console,
    adapters: int = 0,
    kinds: Sequence[str] = tuple(WEIGHTS),
    *,
    topology: Topology = "single",
    replicas: int = 1,
) -> Report:
    """Run the cluster for `kills` faults of these kinds or `time_limit_s`, let it come to rest, check the history.

    `folder` keeps logs and history; without it they are kept only after a violation. With another `topology` than
    `single` Valkey fails over; each primary of a cluster has so many `replicas`.
    """
    signal.signal(signal.SIGTERM, _interrupted)
    # A short path: a unix socket path has at most 108 bytes.
    place = folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    started_s = now_s()
    cluster = Cluster(place, seed, runs, adapters, topology=topology, replicas=replicas)
    if topology != "single":
        kinds = [kind for kind in kinds if kind not in NOT_IN_FAILOVERS]
    try:
        ended = _run_load(cluster, kills, seed, started_s + time_limit_s, kinds)
    finally:
        cluster.end()
    history = read_history(cluster.history)
    report = build(history, check(history), ended, seed, now_s() - started_s, wanted=kills)
    show(report, console)
    if folder is None and report.good:
        shutil.rmtree(place)
    else:
        console.print(f"logs and history: {place}", highlight=False)
    return report


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run_load(cluster: Cluster, kills: int, seed: int, ends_s: float, kinds: Sequence[str]) -> list[str]:
    """Run load and faults, then stop both; return the processes that ended by themselves."""
    recorder = Recorder(cluster.history, "chaos")
    cluster.start()
    observer = Observer(cluster.urls, list(cluster.runs), cluster.history)
    observer.start()
    try:
        _warm_up(cluster)
        faults = Faults(cluster, recorder, random.Random(seed), {kind: WEIGHTS[kind] for kind in kinds})
        faults.run(kills, ends_s)
        _drain(cluster, recorder)
    finally:
        observer.stop()
    ended = faults.ended
    try:
        _record_rest(cluster, recorder)
    except AssertionError as error:  # a run that does not answer: the report has the cause
        ended.append(f"the run at rest: {error}")
    for server in cluster.servers.values():  # clients retry it, so no answer shows it: two leaders, or a late write
        taken = [line for line in server.log.read_text().splitlines() if TAKEN in line]
        ended += [f"{server.name}: {line}" for line in taken]
    recorder.close()
    return ended


def _warm_up(cluster: Cluster) -> None:
    """Wait until every run has trained some steps: a fault without load tests nothing."""
    for run in cluster.runs:
        with Client(cluster.url, run) as client:
            eventually(client.get_run, WARM_UP_TIMEOUT_S, lambda state: state.step >= WARM_UP_STEPS)


def _drain(cluster: Cluster, recorder: Recorder) -> None:
    """Stop the load: producers first, then prompts that are due again, then trainers."""
    producers = [*cluster.producers, *([cluster.generator] if cluster.generator else [])]
    for child in producers:
        child.ask_to_end()
    for child in producers:
        # What it stores from now on would count as lost and found again.
        if child.wait_end(END_TIMEOUT_S) is None:
            raise RuntimeError(f"{child.name} did not end within {END_TIMEOUT_S:g} s of SIGTERM; see {child.log}")
    for run in cluster.runs:
        rest = Rest(cluster.url, run, recorder, cluster.redis_url, cluster.adapters_of(run))
        rest.drain()
        rest.close()
    trainers = [*cluster.trainers.values(), *cluster.replaced]
    for child in (*trainers, *cluster.beside):
        child.ask_to_end()
    for child in (*trainers, *cluster.beside):
        child.wait_end(END_TIMEOUT_S)


def _record_rest(cluster: Cluster, recorder: Recorder) -> None:
    """Record the state of every run, restart all servers, record again; then fold the streams without a server."""
    rests = [Rest(cluster.url, run, recorder, cluster.redis_url, cluster.adapters_of(run)) for run in cluster.runs]
    seen = read_history(cluster.history)
    for rest in rests:
        rest.attach()
        rest.send_again(seen)
    observer = Recorder(cluster.history, "last")
    for run in cluster.runs:
        follower = Follower(cluster.url, run, observer, END_TIMEOUT_S)
        follower.look()
        follower.follow_groups(last=True)
        follower.close()
    observer.close()
    for rest in rests:
        rest.read_payloads()
        rest.look("before")
    for rest in rests:
        rest.read_cursor()
    for server in cluster.servers.values():
        server.kill()
    for url, server in cluster.servers.items():
        server.start()
        cluster.wait_listening(url)
    for rest in rests:
        rest.look("after")
        rest.close()
    for run in cluster.runs:
        recorder.write(asyncio.run(fold(cluster.redis_url, run)))
