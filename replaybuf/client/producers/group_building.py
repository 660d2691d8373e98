"""Build groups from token ids, logprobs and rewards, with errors that name rollout and field.

Every value is checked when it is added, so that the traceback points at the code that made it. The service checks
again, against the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from replaybuf.client.producers.responses import ServerTurn
from replaybuf.errors import GroupRejected, counted
from replaybuf.wire.contract import Ticket
from replaybuf.wire.group import OPTIONAL_PER_TOKEN, Bools, Float32s, Group, Int32s
from replaybuf.wire.group_check import LOGPROB_TOLERANCE, GroupLimits, check_group
from replaybuf.wire.proofs import join_proofs
from replaybuf.wire.text.pieces import Piece, group_of_completions, join_pieces

Numbers: TypeAlias = Sequence[int] | Sequence[float] | Sequence[bool] | npt.NDArray[Any]
"""A list, an array, or a tensor in the memory of the CPU."""
Versions: TypeAlias = int | Sequence[tuple[int, int, int]]
"""One policy version, or spans: version, first token, one past the last."""

_LARGEST_INT32 = 2**31 - 1


def group_builder(
    prompt_ids: Numbers | None = None,
    *,
    prompt_id: str,
    policy_version: int,
    ticket: Ticket | None = None,
    group_id: str | None = None,
    adapter: str = "",
    temperature: float = 1.0,
    metadata: Mapping[str, Any] | None = None,
) -> GroupBuilder:
    """Start the group of one prompt; add rollouts, then `build` it.

    `prompt_ids`: of all rollouts that bring no own; None = every rollout brings its own. `policy_version`: of the
    weights that sample, unless a rollout has another. `ticket`: from `take_tickets`; without one, `group_id` is needed.
    Raises `GroupRejected`.
    """
    if ticket is None and group_id is None:
        raise _rejected("bad_name", "group_id", None, "a name, or a ticket")
    prompt = None if prompt_ids is None else _ids("prompt_ids", prompt_ids)
    fields = {
        "group_id": group_id,
        "ticket": None if ticket is None else ticket.ticket,
        "prompt_index": None if ticket is None else ticket.prompt_index,
        "prompt_id": prompt_id,
        "adapter": adapter,
        "metadata": dict(metadata or {}),
    }
    return GroupBuilder(prompt, policy_version, temperature, fields)


class GroupBuilder:
    """The rollouts of one prompt so far. Made by `group_builder`."""

    def __init__(
        self, prompt_ids: Int32s | None, policy_version: int, temperature: float, fields: dict[str, Any]
    ) -> None:
        self._prompt_ids = prompt_ids
        self._policy_version = policy_version
        self._temperature = temperature
        self._fields = fields
        self._rollouts: list[RolloutBuilder] = []

    def __len__(self) -> int:
        """Return the number of rollouts."""
        return len(self._rollouts)

    def add(
        self,
        completion_ids: Numbers,
        logprobs: Numbers,
        reward: float,
        *,
        mask: Numbers | None = None,
        prompt_ids: Numbers | None = None,
        prompt_mask: Numbers | None = None,
        prompt_logprobs: Numbers | None = None,
        policy_version: Versions | None = None,
        finish_reason: str | None = None,
        **scores: Any,
    ) -> Self:
        """Add a whole rollout. Its lists have one value per completion token; logprobs are in nats.

        `mask`: 0 for tokens that the policy did not sample, as those of a tool; their logprobs do not matter.
        `prompt_mask` and `prompt_logprobs` are those of `RolloutBuilder.train_prompt`. The other arguments are those of
        `rollout`, `RolloutBuilder.sampled` and `RolloutBuilder.score`.
        """
        rollout = self._new(prompt_ids)
        if prompt_mask is not None:
            rollout.train_prompt(prompt_mask, [] if prompt_logprobs is None else prompt_logprobs)
        rollout.sampled(
            completion_ids, logprobs, mask=mask, policy_version=policy_version, finish_reason=finish_reason
        ).score(reward, **scores)
        return self._keep(rollout)

    def rollout(self, prompt_ids: Numbers | None = None) -> RolloutBuilder:
        """Start a rollout of several turns. It is part of the group; one without tokens or reward fails `build`."""
        rollout = self._new(prompt_ids)
        self._keep(rollout)
        return rollout

    def build(self) -> Group:
        """Return the group. The run's estimator fills advantages that no rollout has. Raises `GroupRejected`."""
        if not self._rollouts:
            raise _rejected("no_rollouts", "rollouts", 0, "at least 1")
        ended = [rollout.checked() for rollout in self._rollouts]
        masks, logprobs = zip(*(rollout.prompt_columns for rollout in ended), strict=True)
        in_loss = any(mask.any() for mask in masks)
        group = group_of_completions(
            [rollout.prompt_ids for rollout in ended],
            join_pieces([rollout.piece for rollout in ended]),
            rewards=np.array([rollout.reward for rollout in ended], np.float64),
            temperatures=[self._temperature] * len(ended),
            advantages=_advantages([rollout.advantage for rollout in ended]),
            reward_parts=_parts([rollout.rewards for rollout in ended]),
            **join_proofs([rollout.proof for rollout in ended]),
            prompt_mask=np.concatenate(masks) if in_loss else None,
            prompt_logprobs=np.concatenate(logprobs) if in_loss else None,
            **{name: _columns(name, [rollout.columns.get(name) for rollout in ended]) for name in OPTIONAL_PER_TOKEN},
            **self._fields,
        )
        rejection = check_group(group, GroupLimits(adapters=frozenset({group.adapter})))
        if rejection is not None:
            raise GroupRejected(rejection.reason, rejection.detail, name=rejection.reason)
        return group

    def _new(self, prompt_ids: Numbers | None) -> RolloutBuilder:
        path = f"rollouts[{len(self._rollouts)}]"
        own = self._prompt_ids if prompt_ids is None else _ids(f"{path}.prompt_ids", prompt_ids)
        return RolloutBuilder(path, own, self._policy_version)

    def _keep(self, rollout: RolloutBuilder) -> Self:
        self._rollouts.append(rollout)
        return self


class RolloutBuilder:
    """One rollout, turn by turn: `sampled`, `read`, `sampled`, ... or `turn`, `turn`, ..., and then `score`.

    Tokens of the environment, as the result of a tool, are part of the completion with the mask 0.
    """

    def __init__(self, path: str, prompt_ids: Int32s | None, policy_version: int) -> None:
        self._path = path
        self._prompt_ids = prompt_ids
        self._policy_version = policy_version
        self._trained_prompt: tuple[Bools, Float32s] | None = None
        self._piece: Piece | None = None
        self._reward: float | None = None
        self.rewards: dict[str, float] = {}
        self.advantage: float | None = None
        self.proof: bytes | None = None
        self.columns: dict[str, Float32s] = {}

    @property
    def prompt_ids(self) -> Int32s:
        """Tokens of the prompt, int32 [P]. Raises `GroupRejected` if there are none."""
        if self._prompt_ids is None or not len(self._prompt_ids):
            raise _rejected("empty_prompt", f"{self._path}.prompt_ids", "0 tokens", "at least 1")
        return self._prompt_ids

    @property
    def prompt_columns(self) -> tuple[Bools, Float32s]:
        """Mask and logprobs of the prompt, [P] each; zeros without `train_prompt`."""
        if self._trained_prompt is not None:
            return self._trained_prompt
        tokens = len(self.prompt_ids)
        return np.zeros(tokens, np.bool_), np.zeros(tokens, np.float32)

    @property
    def piece(self) -> Piece:
        """The completion. Raises `GroupRejected` if there is none."""
        if self._piece is None:
            raise _rejected("empty_completion", f"{self._path}.completion_ids", "0 tokens", "at least 1")
        return self._piece

    @property
    def reward(self) -> float:
        """The reward. Raises `GroupRejected` if there is none."""
        if self._reward is None:
            raise _rejected("non_finite_rewards", f"{self._path}.reward", None, "a finite number: call score")
        return self._reward

    def train_prompt(self, mask: Numbers, logprobs: Numbers) -> Self:
        """Put the prompt tokens whose `mask` is 1 into the loss, such as turns that the policy sampled before.

        Both lists have a value per prompt token; logprobs are in nats, and those at a 0 do not matter.
        """
        tokens = len(self.prompt_ids)
        kept = self._mask("prompt_mask", mask, tokens)
        self._trained_prompt = kept, self._logprobs("prompt_logprobs", logprobs, tokens, kept)
        return self

    def sampled(
        self,
        token_ids: Numbers,
        logprobs: Numbers,
        *,
        mask: Numbers | None = None,
        policy_version: Versions | None = None,
        finish_reason: str | None = None,
    ) -> Self:
        """Add tokens that the policy sampled, with their logprobs in nats.

        A later turn may have a newer `policy_version`, never an older one.
        """
        ids = _ids(f"{self._path}.completion_ids", token_ids)
        kept = None if mask is None else self._mask("mask", mask, len(ids))
        values = self._logprobs("logprobs", logprobs, len(ids), kept)
        versions = self._policy_version if policy_version is None else policy_version
        return self._append(Piece(ids, values, self._spans(versions, len(ids)), finish_reason, kept))

    def read(self, token_ids: Numbers) -> Self:
        """Add tokens that the environment wrote and the policy reads, with role markers."""
        ids = _ids(f"{self._path}.completion_ids", token_ids)
        version = self._policy_version if self._piece is None else int(self._piece.spans[-1, 0])
        spans = np.array([(version, 0, len(ids))], np.int32)
        return self._append(Piece(ids, np.zeros(len(ids), np.float32), spans, None, np.zeros(len(ids), np.bool_)))

    def turn(self, turn: ServerTurn, policy_version: Versions | None = None) -> Self:
        """Add a turn from `read_turns`. What its prompt has beyond the tokens so far is the environment's.

        Versions that the server reported count, unless `policy_version` is given.

        Raises `GroupRejected` if its prompt does not begin with the tokens so far: a chat template wrote the
        conversation again, and training would use tokens that the policy never sampled.
        """
        prompt = _ids(f"{self._path}.prompt_ids", turn.prompt_ids)
        if self._prompt_ids is None:
            self._prompt_ids = prompt
        so_far = self._prompt_ids if self._piece is None else np.concatenate([self._prompt_ids, self._piece.token_ids])
        common = min(len(prompt), len(so_far))
        differing = np.flatnonzero(prompt[:common] != so_far[:common])
        if len(prompt) < len(so_far) or len(differing):
            place = int(differing[0]) if len(differing) else common
            fault = f"differ from the {counted(len(so_far), 'token')} so far at token {place}"
            bound = "the tokens so far, unchanged; a chat template may have removed reasoning or spaces"
            raise _rejected("rewritten", f"{self._path}.prompt_ids", fault, bound)
        if len(prompt) > len(so_far):
            self.read(prompt[len(so_far) :])
        versions = turn.versions if policy_version is None else policy_version
        return self.sampled(turn.token_ids, turn.logprobs, policy_version=versions, finish_reason=turn.finish_reason)

    def score(
        self,
        reward: float,
        *,
        rewards: Mapping[str, float] | None = None,
        advantage: float | None = None,
        proof: bytes | None = None,
        **columns: Numbers,
    ) -> Self:
        """Set the reward, its parts by name, and the advantage or `proof` if you have them: for all rollouts or none.

        `columns`: `ref_logprobs`, `old_logprobs`, `teacher_logprobs` or `token_advantages`, one value per token.
        """
        for name, value in {"reward": reward, **{f"rewards.{n}": v for n, v in (rewards or {}).items()}}.items():
            self._finite("non_finite_rewards", name, value)
        if advantage is not None:
            self._finite("non_finite_advantages", "advantage", advantage)
        for name, values in columns.items():
            if name not in OPTIONAL_PER_TOKEN:
                raise TypeError(f"{name} is not a column; the columns are {', '.join(OPTIONAL_PER_TOKEN)}")
            self.columns[name] = self._floats(name, values, len(self.piece))
        self._reward, self.rewards, self.advantage, self.proof = float(reward), dict(rewards or {}), advantage, proof
        return self

    def checked(self) -> Self:
        """Return the rollout if it is complete. Raises `GroupRejected`."""
        for name, column in self.columns.items():
            self._same_length(name, len(column), len(self.piece))
        _ = self.prompt_ids, self.piece, self.reward
        return self

    def _append(self, later: Piece) -> Self:
        if self._piece is not None and self._piece.version_falls(later):
            oldest, newest = int(later.spans[0, 0]), int(self._piece.spans[-1, 0])
            bound = f"at least {newest}, the version of the tokens before: a rewind took back weights in between"
            raise _rejected("bad_version_spans", f"{self._path}.policy_version", oldest, bound)
        if len(later):
            self._piece = later if self._piece is None else self._piece.followed_by(later)
        return self

    def _mask(self, name: str, values: Numbers, tokens: int) -> Bools:
        mask = _array(f"{self._path}.{name}", values)
        self._same_length(name, len(mask), tokens)
        _first(f"{self._path}.{name}", mask, (mask != 0) & (mask != 1), "bad_mask", "0 or 1")
        return mask.astype(np.bool_)

    def _logprobs(self, name: str, values: Numbers, tokens: int, mask: Bools | None) -> Float32s:
        logprobs = self._floats(name, values, tokens, mask)
        high = logprobs > LOGPROB_TOLERANCE
        _first(f"{self._path}.{name}", logprobs, high, "positive_logprobs", f"at most {LOGPROB_TOLERANCE}, in nats")
        return logprobs

    def _floats(self, name: str, values: Numbers, tokens: int, mask: Bools | None = None) -> Float32s:
        """Convert a value per token to float32 [T]; 0 where the mask is 0."""
        floats = _array(f"{self._path}.{name}", values)
        self._same_length(name, len(floats), tokens)
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which is rejected
            floats = floats.astype(np.float32)
        if mask is not None:
            floats = np.where(mask, floats, np.float32(0))
        reason = "non_finite_advantages" if name == "token_advantages" else "non_finite_logprobs"
        _first(f"{self._path}.{name}", floats, ~np.isfinite(floats), reason, "a finite number")
        return floats

    def _spans(self, versions: Versions, tokens: int) -> Int32s:
        spans = (
            [(versions, 0, tokens)] if isinstance(versions, int | np.integer) else [tuple(span) for span in versions]
        )
        name, end, newest = f"{self._path}.policy_version", 0, 0
        for version, start, stop in spans:
            if start != end or stop < start:
                bound = f"spans that cover tokens 0 to {tokens} once, in order"
                raise _rejected("bad_version_spans", name, f"a span from {start} to {stop} after {end}", bound)
            if not newest <= version <= _LARGEST_INT32:
                bound = f"{newest} to {_LARGEST_INT32}; versions start at 0 and never fall within a rollout"
                raise _rejected("bad_version_spans", name, version, bound)
            end, newest = stop, version
        if end != tokens:
            raise _rejected("bad_version_spans", name, f"spans end at token {end}", f"the end, which is token {tokens}")
        return np.array(spans, np.int32).reshape(-1, 3)

    def _same_length(self, name: str, length: int, tokens: int) -> None:
        if length != tokens:
            bound = f"one per {'prompt' if name.startswith('prompt') else 'completion'} token, {tokens}"
            raise _rejected("length_mismatch", f"{self._path}.{name}", counted(length, "value"), bound)

    def _finite(self, reason: str, name: str, value: float) -> None:
        if isinstance(value, str) or not np.isfinite(value):
            raise _rejected(reason, f"{self._path}.{name}", value, "a finite number")


def _rejected(reason: str, name: str, value: object, bound: str) -> GroupRejected:
    return GroupRejected(reason, f"{name}: {value}; needed: {bound}", name=name, value=str(value), bound=bound)


def _array(path: str, values: Numbers) -> npt.NDArray[Any]:
    """Convert to numbers in one dimension. Raises `GroupRejected`."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iufb" and array.size):
        fault = f"{counted(array.ndim, 'dimension')} of {array.dtype}"
        raise _rejected("length_mismatch", path, fault, "one list of numbers")
    return array if array.size else array.astype(np.float32)


def _ids(path: str, values: Numbers) -> Int32s:
    array = _array(path, values)
    wrong = (array < 0) | (array > _LARGEST_INT32)
    if array.dtype.kind == "f":
        wrong |= array != np.floor(array)
    _first(path, array, wrong, "token_out_of_range", f"token ids, 0 to {_LARGEST_INT32}")
    return array.astype(np.int32)


def _first(path: str, values: npt.NDArray[Any], wrong: Bools, reason: str, bound: str) -> None:
    """Raise `GroupRejected` for the first value that is marked as wrong."""
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        raise _rejected(
            reason, f"{path}[{place}]", f"{values[place]:.6g}" if values.dtype.kind == "f" else values[place], bound
        )


def _advantages(values: Sequence[float | None]) -> npt.NDArray[np.float64] | None:
    present = [value for value in values if value is not None]
    if present and len(present) != len(values):
        fault = f"missing in rollouts[{values.index(None)}]"
        raise _rejected("partial_advantages", "advantage", fault, "given for all rollouts or none")
    return np.array(present, np.float64) if present else None


def _columns(name: str, columns: Sequence[Float32s | None]) -> Float32s | None:
    present = [column for column in columns if column is not None]
    if present and len(present) != len(columns):
        fault = f"missing in rollouts[{[column is None for column in columns].index(True)}]"
        raise _rejected("length_mismatch", name, fault, "given for all rollouts or none")
    return np.concatenate(present) if present else None


def _parts(rewards: Sequence[dict[str, float]]) -> dict[str, npt.NDArray[np.float64]]:
    for number, parts in enumerate(rewards):
        if parts.keys() != rewards[0].keys():
            fault = f"the names {sorted(parts)}"
            raise _rejected(
                "length_mismatch", f"rollouts[{number}].rewards", fault, f"those of rollouts[0], {sorted(rewards[0])}"
            )
    return {name: np.array([parts[name] for parts in rewards], np.float64) for name in sorted(rewards[0])}
