"""What is made sure of before the first ticket is taken: everybody is there, and everything fits together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from replaybuf.client.client import AsyncClient, Backoff
from replaybuf.errors import Invalid, NotFound, ReplaybufError, ServiceUnavailable, UnsupportedServer
from replaybuf.generator.engines import Server
from replaybuf.generator.environments import check_prompts, load_rewards, multi_turn
from replaybuf.generator.environments.episodes import Episodes
from replaybuf.generator.environments.scoring import Scorer
from replaybuf.generator.evaluation import HeldOut
from replaybuf.generator.prompts import Prompt
from replaybuf.generator.prompts.curriculum import Supply
from replaybuf.kernel import plugins
from replaybuf.kernel.advantages import check_estimator
from replaybuf.wire.run_status import RunFacts
from replaybuf.wire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_COMPARED_PROMPTS = 16
_TELL_EVERY_S = 10.0


async def wait_for_run(client: AsyncClient, timeout_s: float) -> RunFacts:
    """Wait until the service answers and the run exists. Raises the last error after `timeout_s` seconds."""
    clock = asyncio.get_running_loop().time
    ends_s = clock() + timeout_s
    told, told_s = "", 0.0
    for pause_s in Backoff(first_s=0.2, ceiling_s=2.0).pauses_s():
        try:
            return (await client.get_run()).facts()
        except UnsupportedServer:
            raise
        except (NotFound, ServiceUnavailable) as error:
            if clock() + pause_s > ends_s:
                raise _too_late(error, timeout_s) from error
            if told != str(error) or clock() > told_s + _TELL_EVERY_S:
                told, told_s = str(error), clock()
                logger.warning("waiting for the run, for %.0f s at most: %s", ends_s - told_s, error)
        await asyncio.sleep(pause_s)
    raise ReplaybufError("pauses never end")  # what the type checker cannot see


def check_least(name: str, value: float, least: float) -> None:
    """Raise `Invalid` where an option is below its bound."""
    if value < least:
        raise Invalid(f"{name} is {value}; at least {least} is needed", name=name, value=value, bound=least)


def check_adapter(asked: str, facts: RunFacts) -> None:
    """Raise `Invalid` where the run has no adapter of that name, or has adapters and none is named."""
    if asked not in (facts.adapters or {"": {}}):
        known = sorted(facts.adapters)
        raise Invalid(
            f"adapter is {asked!r}; the run has {known or 'no adapters'}", name="adapter", value=asked, bound=known
        )


def max_staleness(facts: RunFacts) -> int | None:
    """Return the largest staleness a group is used at, as the run stands now; None = unbounded, or not known here.

    Not known is that of a strategy which is not installed beside the generator; then nothing is given up for its age.
    """
    try:
        return plugins.build_strategy(facts.strategy.name, facts.strategy.options).max_staleness
    except Invalid as error:
        logger.warning("staleness of groups in flight is not watched: %s", error.detail)
        return None


def check_group_size(asked: int | None, facts: RunFacts) -> int:
    """Return how many rollouts a group has. Raises `Invalid` where nobody says it or the run says another number."""
    size = asked if asked is not None else facts.group_size
    if size is None:
        raise Invalid(
            "group_size is not given, and the run has none", name="group_size", value=None, bound="at least 1"
        )
    check_least("group_size", size, 1)
    if facts.group_size not in (None, size):
        raise Invalid(
            f"group size is {asked}; the run's group_size is {facts.group_size}",
            name="group_size",
            value=asked,
            bound=facts.group_size,
        )
    return size


def check_fit(
    facts: RunFacts, prompts: Iterable[Prompt], *, group_size: int, max_tokens: int, longest: Mapping[str, int | None]
) -> None:
    """Refuse what could only produce refused groups: the run's estimator, rollouts longer than run or engines take.

    `longest`: the most tokens of a rollout, by who says so; None = any. Lengths are judged by the longest completion
    that is allowed: a group of which one rollout is too long is lost as a whole, and what is lost so is always the
    longest. Raises `Invalid`.
    """
    check_estimator(facts.advantage)
    prompt = max(prompts, key=lambda prompt: len(prompt.token_ids))
    tokens = len(prompt.token_ids) + max_tokens
    bounds = dict(longest)
    if facts.batch.overlong == "reject":
        bounds["the run's batch.seq_len"] = facts.batch.seq_len
    for name, bound in bounds.items():
        if bound is not None and tokens > bound:
            raise Invalid(
                f"prompt {prompt.prompt_id!r} ({prompt.where}) has {len(prompt.token_ids)} tokens, with "
                f"max_tokens {max_tokens} that makes {tokens}; {name} is {bound}",
                name="max_tokens",
                value=max_tokens,
                bound=bound - len(prompt.token_ids),
            )
    least, budget = group_size * (len(prompt.token_ids) + 1), facts.batch.tokens_per_batch
    if budget is not None and least > budget:
        raise Invalid(
            f"a group of {group_size} rollouts of prompt {prompt.prompt_id!r} has at least {least} tokens; "
            f"the run's batch.tokens_per_batch is {budget}",
            name="group_size",
            value=group_size,
            bound=budget,
        )


def check_vocabulary(facts: RunFacts, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with ids that the model or the run has no place for. Raises `Invalid`.

    The model may have more: vocabularies are padded to round numbers.
    """
    bounds = {f"vocab_size in {tokenizer.folder}/config.json": tokenizer.model_vocab_size}
    bounds["the run's vocab_size"] = facts.vocab_size
    for name, bound in bounds.items():
        if bound is not None and tokenizer.vocab_size > bound:
            raise Invalid(
                f"tokenizer {tokenizer.folder} has ids up to {tokenizer.vocab_size - 1}; {name} is {bound}",
                name="tokenizer",
                value=tokenizer.vocab_size,
                bound=bound,
            )


async def check_tokenizer(servers: Sequence[Server], tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> None:
    """Refuse a tokenizer that encodes prompts otherwise than that of a server does. Raises `Invalid`.

    Special tokens are left out; one that a server puts first all the same is passed over.
    """
    text = "".join(prompt.text for prompt in prompts[:_COMPARED_PROMPTS])
    ours = tokenizer.encode(text, add_special_tokens=False)
    for server in servers:
        theirs = await server.tokenize(text)
        if theirs is not None and ours not in (theirs, theirs[1:]):
            at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            raise Invalid(
                f"tokenizer {tokenizer.folder} is not that of model {server.model!r} at {server.url}: it encodes the "
                f"first prompts to {len(ours)} tokens, the server to {len(theirs)}, and they differ from token {at} on",
                name="tokenizer",
                value=str(tokenizer.folder),
                bound=server.url,
            )


def held_out_set(
    prompts: str,
    environment: str,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    temperature: float,
    samples: int,
    reward_timeout_s: float,
    max_turns: int,
    name: str | None = None,
    max_inflight_prompts: int = 32,
) -> HeldOut:
    """Read the prompts of an evaluation and what scores them; it is called after its file where it has no name.

    Raises `Invalid` where the prompts never end, or the environment cannot score one.
    """
    supply = Supply(prompts, tokenizer)
    if not supply.finite:
        raise Invalid(f"prompts {prompts!r} never end; an evaluation needs an end", name="prompts", value=prompts)
    rewards = load_rewards(environment)
    check_prompts(rewards, supply.known)
    played = multi_turn(rewards)
    return HeldOut(
        name=name or Path(prompts).stem,
        prompts=supply.known,
        scorer=Episodes(played, tokenizer, max_turns=max_turns, timeout_s=reward_timeout_s)
        if played
        else Scorer(rewards, timeout_s=reward_timeout_s),
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        temperature=temperature,
        samples=samples,
        max_inflight_prompts=max_inflight_prompts,
        stop_token_ids=tokenizer.stop_token_ids,
    )


def warn_of_overlap(held_out: Iterable[Prompt], training: Iterable[Prompt]) -> None:
    """Say how many held-out prompts are trained on."""
    trained = {prompt.token_ids.tobytes() for prompt in training}
    both = [prompt.where for prompt in held_out if prompt.token_ids.tobytes() in trained]
    if both:
        logger.warning("%d held-out prompts are training prompts too, so they are not held out: %s", len(both), both[0])


def _too_late(error: ReplaybufError, timeout_s: float) -> ReplaybufError:
    return type(error)(f"{error.detail} (waited {timeout_s:g} s)", name=error.name, value=error.value)
