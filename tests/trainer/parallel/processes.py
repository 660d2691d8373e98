"""Ranks of a training as processes: started as torchrun starts them, without its seconds of imports."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from replaybuf.client.client import Client
from replaybuf_trainer.feeds.service import ServiceFeed
from replaybuf_trainer.options import TrainOptions
from replaybuf_trainer.parallel.launch import open_ranks
from replaybuf_trainer.trainer import Trainer
from tests.forked import ForkedFunction
from tests.ports import free_port
from tests.waiting import patience

TIMEOUT_S = 90.0


def start(ranks: int, work: Callable[..., object], *arguments: Any, log: Path) -> list[Any]:
    """Start processes that call `work` with their arguments, in the environment of torchrun; rank r writes `log.r`."""
    port = free_port()
    started = []
    for rank in range(ranks):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        Path(f"{log}.{rank}").touch()
        process = ForkedFunction(target=_run, args=(variables, f"{log}.{rank}", work, *arguments), trainer=True)
        process.start()
        started.append(process)
    return started


def _run(variables: dict[str, str], log: str, work: Callable[..., object], *arguments: Any) -> None:
    os.environ |= variables
    torch.set_num_threads(1)
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO)
    work(*arguments)


def exit_codes(started: Sequence[Any]) -> list[int | None]:
    """Wait for the end of all processes; kill those that do not end."""
    for process in started:
        process.join(TIMEOUT_S * patience())
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    return codes


def train(options: TrainOptions) -> int:
    """Train as the command does."""
    with (
        open_ranks(options.fsdp, options.rank_timeout_s) as ranks,
        Client(options.url, options.run) as client,
    ):
        trainer = Trainer(options, ServiceFeed(options, client, ranks), ranks)
        signal.signal(signal.SIGTERM, lambda *_: trainer.stop())
        return trainer.train()
