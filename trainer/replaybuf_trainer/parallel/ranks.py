"""The processes that train together, and what they tell each other. One process is the trivial case.

All ranks make the same calls in the same order. Values travel as JSON or as tensors, never as pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from replaybuf import errors
from replaybuf.client.retries import Stopped
from replaybuf.wire.decoding import prepared
from replaybuf_trainer.faults import TrainingFault

T = TypeVar("T")


class Ranks:
    """A single process: every call returns what it was given.

    `sharded`: whether each rank holds a part of every parameter. `background`: the process group of a thread that works
    beside the training, None in a single process.
    """

    rank = 0
    size = 1
    sharded = False
    device = torch.device("cpu")
    background: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank talks to service and engines and writes files that all ranks share."""
        return self.rank == 0

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. A value must be of JSON's types."""
        return [value]

    def first(self, call: Callable[[], T]) -> T:
        """Make a call on the first rank; return its JSON value, or raise its error, on every rank."""
        return call()

    def together(self, call: Callable[[], T]) -> T:
        """Make a call on every rank; if it fails on some, raise the error of the lowest such rank on every rank."""
        return call()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a CPU tensor over all ranks."""
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers of all ranks as one CPU tensor; `values` [n], and n may differ."""
        return values

    def in_step(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches as long as every rank has one, so that all ranks stop after the same step."""
        while True:
            batch = self.together(lambda: next(batches, None))
            everywhere = all(self.exchange(batch is not None))
            if batch is None or not everywhere:
                return
            yield batch


class _Outcome(msgspec.Struct, omit_defaults=True):
    """What a call came to: a JSON value, or an error by class and message."""

    value: Any = None
    error: str | None = None
    detail: str = ""


class TorchRanks(Ranks):
    """The processes of one torchrun. `control` and `background` are groups of CPU tensors."""

    sharded = True

    def __init__(self, device: torch.device, control: dist.ProcessGroup, background: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self.background = background
        self._control = control

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        sent = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        return [msgspec.json.decode(part.numpy().tobytes()) for part in self._gather(sent)]

    def first(self, call: Callable[[], T]) -> T:
        """Make a call on the first rank; return its value, or raise its error, on every rank."""
        outcome, error = _Outcome(), None
        if self.is_first:
            outcome, error = _try(call)
        value: T = self._settle(
            msgspec.convert(self.exchange(msgspec.to_builtins(outcome))[0], prepared(_Outcome)), error
        )
        return value

    def together(self, call: Callable[[], T]) -> T:
        """Make a call on every rank; if it fails on some, raise the error of the lowest such rank on every rank."""
        mine, error = _try(call)
        own = _Outcome(error=mine.error, detail=mine.detail)  # the value stays here: it may be a batch
        outcomes = [msgspec.convert(answer, prepared(_Outcome)) for answer in self.exchange(msgspec.to_builtins(own))]
        failed = [(rank, answer) for rank, answer in enumerate(outcomes) if answer.error is not None]
        if failed:
            rank, outcome = failed[0]
            self._settle(outcome, error if rank == self.rank else None)
        value: T = mine.value
        return value

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a CPU tensor over all ranks."""
        total = values.clone()
        dist.all_reduce(total, group=self._control)
        return total

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers of all ranks as one CPU tensor."""
        return torch.cat(self._gather(values.cpu()))

    def _gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(values)]), group=self._control)
        longest = max(int(length) for length in lengths)
        padded = values.new_zeros(longest)
        padded[: len(values)] = values
        parts = [values.new_zeros(longest) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._control)
        return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def _settle(self, outcome: _Outcome, mine: Exception | None) -> Any:
        if mine is not None:
            raise mine
        if outcome.error is not None:
            raise _error_of(outcome)
        return outcome.value


def _try(call: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(value=call()), None
    except Exception as error:  # noqa: BLE001  # raised again, on every rank
        return _Outcome(error=type(error).__name__, detail=str(error)), error


def _error_of(outcome: _Outcome) -> Exception:
    """Build another rank's error: of the same class where that is one of ours, so that all ranks end alike."""
    if outcome.error == Stopped.__name__:
        return Stopped(outcome.detail)
    kind = getattr(errors, outcome.error or "", None)
    if isinstance(kind, type) and issubclass(kind, errors.ReplaybufError) and "__init__" not in vars(kind):
        return kind(outcome.detail)
    ours = outcome.error == TrainingFault.__name__
    return TrainingFault(outcome.detail if ours else f"another rank failed with {outcome.error}: {outcome.detail}")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all ranks; every rank must call this. Other tensors stay as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
