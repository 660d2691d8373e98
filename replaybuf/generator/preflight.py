"""Checks before the first ticket: the run exists, and run, engines, prompts and tokenizer fit together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from replaybuf.client.client import AsyncClient
from replaybuf.client.retries import Backoff
from replaybuf.errors import DataLost, Invalid, NotFound, ServiceUnavailable, UnsupportedServer, counted
from replaybuf.generator.engines import Server
from replaybuf.generator.environments.length_penalty import LengthPenalty
from replaybuf.generator.prompts import Prompt
from replaybuf.kernel.strategy.advantages import PROCESS, check_estimator
from replaybuf.wire.answer.run_status import RunFacts
from replaybuf.wire.text.model_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_COMPARED_PROMPTS = 16
_LOG_EVERY_S = 10.0


async def wait_for_run(client: AsyncClient, timeout_s: float) -> RunFacts:
    """Wait until the service answers, has the data of the run and the run exists.

    Raises the last error after `timeout_s` seconds.
    """
    clock = asyncio.get_running_loop().time
    ends_s = clock() + timeout_s
    logged, logged_s = "", 0.0
    pauses_s = Backoff(first_s=0.2, ceiling_s=2.0).pauses_s()
    while True:
        try:
            return (await client.get_run()).facts()
        except UnsupportedServer:
            raise
        except (NotFound, ServiceUnavailable, DataLost) as error:
            pause_s = next(pauses_s)
            if clock() + pause_s > ends_s:
                detail = f"{error.detail} (waited {timeout_s:g} s)"
                raise type(error)(detail, name=error.name, value=error.value) from error
            if logged != str(error) or clock() > logged_s + _LOG_EVERY_S:
                logged, logged_s = str(error), clock()
                logger.warning("waiting for the run, up to %.0f s: %s", ends_s - logged_s, error)
        await asyncio.sleep(pause_s)


def check_least(name: str, value: float, least: float) -> None:
    """Raise `Invalid` where an option is below its bound."""
    if value < least:
        raise Invalid(f"{name} is {value}; the minimum is {least}", name=name, value=value, bound=least)


def check_adapter(adapter: str, facts: RunFacts) -> None:
    """Raise `Invalid` where the run has no adapter of that name; the name is "" for a run without adapters."""
    if adapter not in (facts.adapters or {"": {}}):
        names = sorted(facts.adapters)
        detail = f"adapter is {adapter!r}; the run has {names or 'no adapters'}"
        raise Invalid(detail, name="adapter", value=adapter, bound=names)


def check_group_size(option: int | None, facts: RunFacts) -> int:
    """Return the group size. Raises `Invalid` where neither option nor run has one, or both differ."""
    size = option if option is not None else facts.group_size
    if size is None:
        detail = "group_size is not set, neither as an option nor in the run"
        raise Invalid(detail, name="group_size", value=None, bound="at least 1")
    check_least("group_size", size, 1)
    if facts.group_size not in (None, size):
        detail = f"group_size is {option}; the run's group_size is {facts.group_size}"
        raise Invalid(detail, name="group_size", value=option, bound=facts.group_size)
    return size


def check_length_penalty(penalty: LengthPenalty | None, facts: RunFacts) -> None:
    """Raise `Invalid` where the estimator of the run does not use the reward that a penalty is added to."""
    if penalty is not None and facts.advantage == PROCESS:
        raise Invalid(
            f"advantage of the run is {PROCESS!r}, which uses process rewards in place of the reward; remove "
            "length_penalty, or choose another advantage",
            name="length_penalty",
            value=penalty.cache_tokens,
        )


def check_fit(
    facts: RunFacts, prompts: Iterable[Prompt], *, group_size: int, max_tokens: int, longest: Mapping[str, int | None]
) -> None:
    """Raise `Invalid` for an unknown estimator, and where rollouts can be longer than the run or the engines allow.

    `longest`: maximum tokens of a rollout by the name of the bound; None = unbounded. The longest allowed completion
    counts, because one rollout that is too long costs its whole group, and that would lose the long ones first.
    """
    check_estimator(facts.advantage)
    prompt = max(prompts, key=lambda prompt: len(prompt.token_ids))
    length = len(prompt.token_ids)
    bounds = dict(longest)
    if facts.batch.overlong == "reject":
        bounds["the run's batch.seq_len"] = facts.batch.seq_len
    for name, bound in bounds.items():
        if bound is not None and length + max_tokens > bound:
            raise Invalid(
                f"prompt {prompt.prompt_id!r} ({prompt.where}) has {counted(length, 'token')}; with max_tokens "
                f"{max_tokens} a rollout has {length + max_tokens}; {name} is {bound}; {_remedy(bound - max_tokens)}",
                name="max_tokens",
                value=max_tokens,
                bound=bound - length,
            )
    least, budget = group_size * (length + 1), facts.batch.token_budget
    if budget is not None and least > budget:
        raise Invalid(
            f"a group of {counted(group_size, 'rollout')} of prompt {prompt.prompt_id!r} has at least "
            f"{counted(least, 'token')}; the run's batch.tokens_per_batch is {budget}",
            name="group_size",
            value=group_size,
            bound=budget,
        )


def _remedy(longest_prompt: int) -> str:
    if longest_prompt < 1:
        return "lower --max-tokens"
    return f"--prompt-filter '{{\"max_tokens\": {longest_prompt}}}' drops prompts that are too long"


def check_vocabulary(facts: RunFacts, tokenizer: Tokenizer) -> None:
    """Raise `Invalid` for a tokenizer with more ids than the model or the run.

    The model may have more ids, because vocabularies are padded to round numbers.
    """
    bounds = {f"vocab_size in {tokenizer.folder}/config.json": tokenizer.model_vocab_size}
    bounds["the run's vocab_size"] = facts.vocab_size
    for name, bound in bounds.items():
        if bound is not None and tokenizer.vocab_size > bound:
            detail = f"tokenizer {tokenizer.folder} has ids up to {tokenizer.vocab_size - 1}; {name} is {bound}"
            raise Invalid(detail, name="tokenizer", value=tokenizer.vocab_size, bound=bound)


async def check_tokenizer(servers: Sequence[Server], tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> None:
    """Raise `Invalid` where a server's tokenizer encodes the first prompts to other ids.

    Special tokens are left out; one that a server still puts first is ignored.
    """
    text = "".join(prompt.text for prompt in prompts[:_COMPARED_PROMPTS])
    ours = tokenizer.encode(text, add_special_tokens=False)
    for server in servers:
        theirs = await server.tokenize(text)
        if theirs is not None and ours not in (theirs, theirs[1:]):
            at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            raise Invalid(
                f"tokenizer {tokenizer.folder} is not the tokenizer of model {server.model!r} at {server.url}: it "
                f"encodes the first prompts to {counted(len(ours), 'token')}, the server to {len(theirs)}; the "
                f"first difference is at token {at}",
                name="tokenizer",
                value=str(tokenizer.folder),
                bound=server.url,
            )


def warn_of_overlap(held_out: Iterable[Prompt], training: Iterable[Prompt]) -> None:
    """Log how many held-out prompts are also training prompts."""
    trained = {prompt.token_ids.tobytes() for prompt in training}
    overlap = [prompt.where for prompt in held_out if prompt.token_ids.tobytes() in trained]
    if overlap:
        prompts = counted(len(overlap), "held-out prompt")
        logger.warning("also used for training: %s; the first: %s", prompts, overlap[0])
