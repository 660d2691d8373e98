"""The configuration of a run, as `PUT /v1/runs/{run}` takes it, and strict decoding of JSON bodies."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from replaybuf.errors import Invalid, Malformed, NotFound

T = TypeVar("T")

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MIN_TOKENS_PER_ROLLOUT = 2
"""One prompt token and one completion token: no rollout is shorter."""

LARGEST_INTEGER = 2**53 - 1
"""Largest whole number that every JSON reader keeps exactly; it also fits every column and record."""
LONGEST_S = 366 * 86400.0

Positive = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
NonNegative = Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parts: immutable, and a field nobody knows is refused."""


class StrategySpec(Spec, frozen=True):
    """A strategy or filter by the name of its entry point, with its options."""

    name: str = "one-step-off-policy"
    options: dict[str, Any] = {}


class BatchSpec(Spec, frozen=True):
    """What makes a batch full. A batch never exceeds `tokens_per_batch` and never splits a group.

    `seq_len` is the room of one micro-batch in tokens; a longer rollout goes by the rule `overlong`.
    """

    tokens_per_batch: Positive | None = 65536
    groups_per_batch: Positive | None = None
    seq_len: Annotated[int, Meta(ge=MIN_TOKENS_PER_ROLLOUT)] = 4096
    pad_to_multiple_of: Positive = 1
    overlong: Literal["reject", "truncate"] = "reject"


class TicketSpec(Spec, frozen=True):
    """Leave to generate: its life, tries per prompt, size of a finite supply of prompts (None = endless)."""

    ttl_s: Seconds = 600
    max_attempts: Positive = 3
    prompts: Positive | None = None


class Limits(Spec, frozen=True):
    """Bounds on what the buffer holds: tokens and bytes (of frames) of live groups, bytes of one group's frame."""

    max_tokens_live: Positive | None = None
    max_bytes_live: Positive | None = None
    max_group_bytes: Positive = 67108864


class RunConfig(Spec, frozen=True):
    """One run. All parts but `batch` have defaults; docs: design section 5.

    Raises nothing itself: `check_run_config` judges the whole.
    """

    batch: BatchSpec
    strategy: StrategySpec = StrategySpec()
    filters: list[StrategySpec] = []
    group_size: Positive | None = None
    vocab_size: Positive | None = None
    steps_per_publish: Positive = 1
    max_steps: Positive | None = None
    seed: NonNegative = 0
    advantage: str = "grpo"
    tickets: TicketSpec = TicketSpec()
    limits: Limits = Limits()
    adapters: dict[str, dict[str, Any]] = {}

    def version_of(self, step: int) -> int:
        """Version of the policy trained at `step`: version(step) = step // steps_per_publish."""
        return step // self.steps_per_publish


class StrategyChange(Spec, frozen=True):
    """The strategy from here on: without `name` the run's own, options left out at their defaults."""

    name: str | None = None
    options: dict[str, Any] = {}


class ConfigPatch(Spec, frozen=True):
    """What `PATCH /v1/runs/{run}` may change while the run goes on."""

    strategy: StrategyChange | None = None
    filters: list[StrategySpec] | None = None
    limits: Limits | None = None
    state: Literal["running", "paused", "finished"] | None = None


def check_run_name(run: str) -> str:
    """Return `run` if it is a valid name. Raises `Invalid`."""
    if not RUN_NAME.fullmatch(run):
        raise Invalid(
            f"run is {run!r}; it must match {RUN_NAME.pattern}", name="run", value=run, bound=RUN_NAME.pattern
        )
    return run


def check_run_config(config: RunConfig) -> None:
    """Refuse, with the reason, what would deadlock or starve (guarantee 12). Raises `Invalid`."""
    batch, limits = config.batch, config.limits
    budget = batch.tokens_per_batch
    if budget is None and batch.groups_per_batch is None:
        raise Invalid(
            "batch.tokens_per_batch and batch.groups_per_batch are both null; a batch would never be full",
            name="batch.tokens_per_batch",
            value=None,
            bound="one of the two set",
        )
    smallest_group = (config.group_size or 1) * MIN_TOKENS_PER_ROLLOUT
    if budget is not None and budget < smallest_group:
        raise Invalid(
            f"batch.tokens_per_batch is {budget}; one group has at least {smallest_group} tokens, "
            "so no batch could ever hold one",
            name="batch.tokens_per_batch",
            value=budget,
            bound=smallest_group,
        )
    smallest_batch = max(
        smallest_group * (batch.groups_per_batch or 1), budget if batch.groups_per_batch is None and budget else 0
    )
    if limits.max_tokens_live is not None and limits.max_tokens_live < smallest_batch:
        raise Invalid(
            f"limits.max_tokens_live is {limits.max_tokens_live}; one batch needs {smallest_batch} tokens live, "
            "so no batch would ever be full",
            name="limits.max_tokens_live",
            value=limits.max_tokens_live,
            bound=smallest_batch,
        )
    if limits.max_bytes_live is not None and limits.max_bytes_live < limits.max_group_bytes:
        raise Invalid(
            f"limits.max_bytes_live is {limits.max_bytes_live}; one group may have limits.max_group_bytes, "
            f"{limits.max_group_bytes}, so it could never enter",
            name="limits.max_bytes_live",
            value=limits.max_bytes_live,
            bound=limits.max_group_bytes,
        )
    if batch.pad_to_multiple_of > batch.seq_len or batch.seq_len % batch.pad_to_multiple_of:
        raise Invalid(
            f"batch.pad_to_multiple_of is {batch.pad_to_multiple_of}; it must divide batch.seq_len, {batch.seq_len}",
            name="batch.pad_to_multiple_of",
            value=batch.pad_to_multiple_of,
            bound=batch.seq_len,
        )
    if config.adapters:
        raise Invalid(
            f"adapters is {sorted(config.adapters)}; this release trains one policy per run, without adapters",
            name="adapters",
            value=sorted(config.adapters),
            bound=[],
        )


def differing_fields(old: RunConfig, new: RunConfig) -> list[str]:
    """Name the fields, dotted, in which two configurations differ."""

    def walk(prefix: str, left: Any, right: Any) -> list[str]:
        if isinstance(left, dict) and isinstance(right, dict) and prefix.count(".") < 2:
            keys = sorted(left.keys() | right.keys())
            return [path for key in keys for path in walk(f"{prefix}{key}.", left.get(key), right.get(key))]
        return [] if left == right else [prefix.removesuffix(".")]

    return walk("", msgspec.to_builtins(old), msgspec.to_builtins(new))


def decode_json(body: bytes, shape: type[T]) -> T:
    """Decode a JSON body strictly.

    Raises `Malformed` where it is not JSON or has another shape, `Invalid` where a number or text is outside its bound.
    NaN and infinities are taken as what they are (outside the JSON standard, but what Python's encoder writes), so that
    the check that follows can name them.
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _explained(error, body) from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = _loads(body)
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise _explained(error, body) from None


def convert(value: Any, shape: type[T], where: str) -> T:
    """Convert decoded values to `shape`. Raises `Invalid` naming the field, below `where`, that does not fit."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        name = where + path.rstrip("`")
        raise Invalid(f"{name}: {message}", name=name, value=value, bound=message) from None


def _loads(body: bytes) -> Any:
    """Parse JSON as Python does. Raises `Malformed`, also for half a surrogate pair, which no UTF-8 text can hold."""
    try:
        value = json.loads(body.decode())
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"body is not JSON: {error}", name="body", value=_excerpt(body), bound="JSON") from None
    return value


def _explained(error: msgspec.ValidationError, body: bytes) -> Invalid | Malformed:
    message, _, path = str(error).partition(" - at `$")
    name = path.rstrip("`").lstrip(".") or "body"
    value = _loads(body)  # what follows the fault may not even be JSON
    for part in re.findall(r"[^.\[\]]+", name) if name != "body" else []:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None  # a name given twice: JSON keeps the last
    shown = value if isinstance(value, str | int | float | None) else type(value).__name__
    kind = Invalid if re.search(r"[<>]=? |matching regex|Invalid enum", message) else Malformed
    return kind(f"{name} is {shown!r}: {message}", name=name, value=shown, bound=message)


def _excerpt(body: bytes) -> str:
    return body[:80].decode("utf-8", "replace")


def known(name: str, value: str, valid: list[str]) -> None:
    """Raise `NotFound` where `value` is not among `valid`, naming both."""
    if value not in valid:
        raise NotFound(f"{name} is {value!r}; known: {', '.join(valid) or 'none'}", name=name, value=value, bound=valid)
