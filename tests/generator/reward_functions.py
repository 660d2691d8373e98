"""Rewards of a user, named by MODULE:NAME in tests."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from urllib.parse import quote

from replaybuf.errors import Invalid
from replaybuf.generator.environments import Score
from replaybuf.generator.prompts import Prompt

NOT_CALLABLE = 3


def length(prompt: Prompt, completion: str) -> int:
    """Reward length."""
    return len(completion)


async def waited(prompt: Prompt, completion: str) -> Score:
    """Return the length after one iteration of the loop, with a part; hang or raise if the completion is that word."""
    await asyncio.sleep(0)
    if completion == "hang":
        await asyncio.Event().wait()
    if completion == "raise":
        raise ValueError("no parse")
    return Score(float(len(completion)), {"half": len(completion) / 2})


def scripted(prompt: Prompt, completion: str) -> float:
    """Act by the words of the completion; print, as users do."""
    print("printed by a reward")
    if completion == "hang":
        threading.Event().wait()
    if completion == "exit":
        os._exit(3)
    if completion == "raise exit":
        raise SystemExit(3)
    if completion == "nan":
        return float("nan")
    if completion == "pid":
        return os.getpid()
    return float(completion == prompt.answer and prompt.metadata == {"level": 2})


class Strict:
    """An environment that needs an answer."""

    def check(self, prompt: Prompt) -> None:
        """Ask for one."""
        if prompt.answer is None:
            raise Invalid("has no answer; strict needs one")

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Compare."""
        return Score(float(completion_text == prompt.answer))


class Unchecked:
    """An environment that lacks `check`."""

    def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Give nothing."""
        return Score(0.0)


class Broken:
    """An environment that does not build."""

    def __init__(self) -> None:
        raise RuntimeError(f"no licence on {sys.platform}")


def halves(prompt: Prompt, completion: str) -> Score:
    """Reward the first half, and not the second."""
    return Score(0.5, process_rewards=((len(completion) // 2, 1.0), (len(completion), 0.0)))


def leaking(prompt: Prompt, completion: str) -> float:
    """Raise an error that holds a secret of the environment, also as a user's code would write it elsewhere."""
    key = os.environ["JUDGE_KEY"]
    raise ValueError(f"the judge refused {key}, {quote(key)}, {json.dumps(key)} at http://me:{key[:9]}@judge/")
