"""Start and end of the ranks of one torchrun, and the error of the others when one is lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from replaybuf.errors import Invalid
from replaybuf_trainer.faults import TrainingFault
from replaybuf_trainer.parallel.ranks import Ranks, TorchRanks

AGREE_POLL_S = 0.02
LOST_WAIT_S = 5.0
"""How long a rank that lost its connections waits for the other ranks to report that they are alive."""


@contextlib.contextmanager
def open_ranks(fsdp: bool, timeout_s: float) -> Iterator[Ranks]:
    """Connect the ranks of a torchrun, or yield a single process without `fsdp`.

    No rank waits for another for more than `timeout_s`. Raises `Invalid` if torchrun and `--fsdp` do not go together,
    and `TrainingFault` if another rank is lost; the message has its number and, where it is known, its error.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if not fsdp:
        if started > 1:
            detail = f"torchrun started {started} processes; give --fsdp, or start one process without torchrun"
            raise Invalid(detail, name="fsdp", value=False)
        yield Ranks()
        return
    if "WORLD_SIZE" not in os.environ:
        detail = "--fsdp needs torchrun: torchrun --nproc-per-node 2 -m -- replaybuf train --fsdp ..."
        raise Invalid(detail, name="fsdp", value=True)
    store, ranks = _connect(timedelta(seconds=timeout_s))
    try:
        yield ranks
    except BaseException as error:
        if _is_lost_connection(error):
            _report(store, ranks, "alive")
            raise TrainingFault(_who_is_lost(store, ranks, error), name="rank") from error
        _report(store, ranks, f"{type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()


def _connect(timeout: timedelta) -> tuple[Store, TorchRanks]:
    shared, rank, size = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(_agree_on_attempt(shared, rank, size, timeout), shared)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    groups = PrefixStore("groups", store)
    dist.init_process_group(backend, store=groups, rank=rank, world_size=size, timeout=timeout)
    control, background = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    return PrefixStore("ranks", store), TorchRanks(device, control, background)


def _agree_on_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that only the ranks of this attempt share.

    After a restart torchrun may hand out the same store, and its keys of the attempt before would let new groups wait
    for dead processes. The plan is the list of the nonces of all ranks; the name is its digest. A plan with the nonce
    of a dead process is never confirmed by all, and rank 0 replaces it when the new process has said hello.
    """
    nonce, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"hello/{rank}", nonce)
    while time.monotonic() < deadline:
        if rank == 0:
            store.set("plan", " ".join(store.get(f"hello/{other}").decode() for other in range(size)))
        plan = store.get("plan").decode()
        if plan.split()[rank : rank + 1] == [nonce]:
            name = hashlib.sha256(plan.encode()).hexdigest()
            store.set(f"{name}/{rank}", "here")
            if store.check([f"{name}/{other}" for other in range(size)]):
                return name
        time.sleep(AGREE_POLL_S)
    raise TrainingFault(
        f"rank {rank}: not all of {size} ranks have started within {timeout.total_seconds():g} s (--rank-timeout-s)",
        name="rank",
        value=rank,
        bound=timeout.total_seconds(),
    )


def _is_lost_connection(error: BaseException) -> bool:
    # gloo raises a plain RuntimeError, as a full GPU does
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _report(store: Store, ranks: Ranks, state: str) -> None:
    with contextlib.suppress(RuntimeError):  # the store is gone with the first machine: nobody reads this
        store.set(str(ranks.rank), state[:1000])


def _who_is_lost(store: Store, ranks: Ranks, error: BaseException) -> str:
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    deadline = time.monotonic() + LOST_WAIT_S
    try:
        while not store.check([str(rank) for rank in others]) and time.monotonic() < deadline:
            time.sleep(0.05)
        reports = {rank: store.get(str(rank)).decode() for rank in others if store.check([str(rank)])}
    except RuntimeError:
        return f"rank {ranks.rank} of {ranks.size} lost its connection to the other ranks: {error}"
    gone = [f"rank {rank} does not answer" for rank in others if rank not in reports]
    failed = [f"rank {rank} ended with {report}" for rank, report in reports.items() if report != "alive"]
    why = "; ".join(gone + failed) or f"all ranks are alive: {error}"
    return f"rank {ranks.rank} of {ranks.size} cannot go on: {why}. Start again: training resumes from the checkpoint"
