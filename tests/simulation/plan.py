"""Which schedule to run: its seed, and what is left out of it to make a failure short."""

from __future__ import annotations

import msgspec

from tests.simulation.release import release


class Plan(msgspec.Struct, frozen=True):
    """A schedule to run.

    - `broken`: name of a guarantee that is broken on purpose
    - `only`: numbers of the faults that happen, in the order in which they are drawn; None = all
    - `faults_s`: length of the fault phase; None = drawn from the seed
    - `redis`: the kind of Redis, one of `mix.REDIS`; None = drawn from the seed
    """

    seed: int
    broken: str | None = None
    only: tuple[int, ...] | None = None
    faults_s: float | None = None
    redis: str | None = None

    @property
    def command(self) -> str:
        """The command that runs it again."""
        options = [f"--release {release()}"]
        options += [f"--broken {self.broken}"] if self.broken else []
        options += [f"--only {','.join(map(str, self.only)) or 'none'}"] if self.only is not None else []
        options += [f"--faults-s {self.faults_s:g}"] if self.faults_s is not None else []
        options += [f"--redis {self.redis}"] if self.redis else []
        return f"make simulate-faults SEED={self.seed} ARGS='{' '.join(options)}'"
