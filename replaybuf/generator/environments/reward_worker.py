"""One process of a reward pool, `python -m replaybuf.generator.environments.reward_worker ENVIRONMENT`.

Whatever the environment prints goes to standard error. The process ends when its standard input does, in the
middle of a score too, so that none outlives a generator that was killed.
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

from replaybuf.errors import ReplaybufError, RewardFault
from replaybuf.generator.environments.contract import load_rewards
from replaybuf.generator.environments.reward_pool import Answer, Job, framed, length_of
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.prompts.prompt import Prompt

_HEAD_BYTES = 4
_NO_BOUND_S = 1e9
"""The pool keeps the time, and kills."""


def main() -> None:
    """Score group after group."""
    jobs = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        scorer = Scorer(load_rewards(sys.argv[1]), timeout_s=_NO_BOUND_S)
    except ReplaybufError as error:
        _send(answers, Answer(reason="unfit", detail=error.detail))
        return
    _send(answers, Answer())
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs, waiting), daemon=True).start()
    with asyncio.Runner() as runner:
        while True:
            _send(answers, runner.run(_answered(scorer, waiting.get())))


async def _answered(scorer: Scorer, job: Job) -> Answer:
    ids = np.array(job.token_ids, np.int32)
    prompt = Prompt(job.prompt_id, job.text, ids, job.answer, job.metadata, job.where)
    try:
        scores = await scorer.score(prompt, job.completions)
    except RewardFault as fault:
        return Answer(reason=fault.reason, detail=fault.detail)
    parts = {name: part.tolist() for name, part in scores.parts.items()}
    return Answer(rewards=scores.rewards.tolist(), parts=parts, process_rewards=scores.process_rewards)


def _read(jobs: BinaryIO, waiting: queue.SimpleQueue[Job]) -> None:
    while head := jobs.read(_HEAD_BYTES):
        waiting.put(msgspec.msgpack.decode(jobs.read(length_of(head)), type=Job))
    os._exit(0)  # the generator is gone: nobody waits for what is being scored


def _send(answers: BinaryIO, answer: Answer) -> None:
    answers.write(framed(answer))
    answers.flush()


if __name__ == "__main__":
    main()
