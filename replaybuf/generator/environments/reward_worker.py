"""Worker process of a reward pool: `python -m replaybuf.generator.environments.reward_worker ENVIRONMENT`.

Prints of the environment go to standard error. The process ends when its standard input ends, in the middle of a
score too, so it does not outlive a killed generator.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from typing import BinaryIO

import msgspec
import numpy as np

from replaybuf.client.producers.failures import render_traceback
from replaybuf.errors import ReplaybufError, RewardFault
from replaybuf.generator.environments import load_rewards
from replaybuf.generator.environments.reward_pool import Answer, Job
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.prompts import Prompt
from replaybuf.wire.pipes import claim_pipes, received

_UNLIMITED_S = 1e9
"""The pool enforces the time limit."""
_JOBS = msgspec.msgpack.Decoder(Job)


def main() -> None:
    """Score group after group."""
    jobs, send = claim_pipes()
    try:
        scorer = Scorer(load_rewards(sys.argv[1]), timeout_s=_UNLIMITED_S)
    except ReplaybufError as error:
        send(0, Answer(reason="unfit", detail=error.detail))
        return
    send(0, Answer())
    waiting: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs, waiting), daemon=True).start()
    with asyncio.Runner() as runner:
        while True:
            number, job = waiting.get()
            send(number, runner.run(_answer(scorer, job)))


async def _answer(scorer: Scorer, job: Job) -> Answer:
    ids = np.array(job.token_ids, np.int32)
    prompt = Prompt(job.prompt_id, job.text, ids, job.answer, job.metadata, job.where)
    try:
        scores = await scorer.score(prompt, job.completions)
    except RewardFault as fault:
        trace = render_traceback(fault.__cause__ or fault)
        return Answer(reason=fault.reason, detail=fault.detail, traceback=trace)
    parts = {name: part.tolist() for name, part in scores.parts.items()}
    return Answer(rewards=scores.rewards.tolist(), parts=parts, process_rewards=scores.process_rewards)


def _read(jobs: BinaryIO, waiting: queue.SimpleQueue[tuple[int, Job]]) -> None:
    for numbered in received(jobs, _JOBS):
        waiting.put(numbered)
    os._exit(0)  # the generator is gone


if __name__ == "__main__":
    main()
