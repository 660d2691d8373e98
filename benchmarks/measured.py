"""Results of a benchmark: machine, versions, and figures as median, spread and ratio to a named reference.

    results = Measured("selection", reference="list of dicts", packages=["numpy"], settings={"groups": 1_000_000})
    sides = {"columns": took_ms, "list of dicts": reference_ms}
    targets = {"columns": [Target("ratio", "at least", 10)]}
    results.record("replay, uniform", sides, unit="ms", ratio="reference / it", targets=targets)
    results.save()

`record` prints a line per side. `save` writes `benchmarks/results/NAME.json`, or into the folder of
`REPLAYBUF_BENCH_RESULTS`.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

RESULTS = Path(os.environ.get("REPLAYBUF_BENCH_RESULTS", Path(__file__).parent / "results"))

Ratio = Literal["it / reference", "reference / it"]


class Machine(msgspec.Struct, frozen=True):
    """The machine of a run. `load` is the mean of running processes over the minute before."""

    cpus: int
    processor: str
    system: str
    load: float
    python: str
    packages: dict[str, str]


class Target(msgspec.Struct, frozen=True):
    """A bound of one side's median, in its unit, or of its ratio."""

    of: Literal["median", "ratio"]
    wanted: Literal["at least", "at most"]
    bound: float

    def met(self, figure: float) -> bool:
        """Return whether a median or ratio keeps the bound."""
        return figure >= self.bound if self.wanted == "at least" else figure <= self.bound


class Judged(msgspec.Struct, frozen=True):
    """A target, and whether the run met it."""

    target: Target
    met: bool

    def __str__(self) -> str:
        target = self.target
        return f"target: {target.of} {target.wanted} {target.bound:g}, {'met' if self.met else 'missed'}"


class Figure(msgspec.Struct, frozen=True):
    """One side of one comparison: median, least and largest of `repeats` values, and the ratio of the medians."""

    what: str
    side: str
    unit: str
    median: float
    least: float
    largest: float
    repeats: int
    reference: str
    ratio: float | None
    ratio_is: Ratio
    targets: tuple[Judged, ...] = ()


class Measured:
    """Figures of one run of a benchmark, compared with the side named `reference`."""

    def __init__(
        self, benchmark: str, *, reference: str, packages: Sequence[str] = (), settings: Mapping[str, Any] | None = None
    ) -> None:
        self.benchmark = benchmark
        self.reference = reference
        self.settings = dict(settings or {})
        self.machine = describe_machine(packages)
        self.figures: list[Figure] = []
        versions = ", ".join(f"{name} {number}" for name, number in self.machine.packages.items())
        print(f"{benchmark}: {self.machine.cpus} CPUs under load {self.machine.load:.1f}, Python {self.machine.python}")
        print(f"{versions or 'no packages'}; {' '.join(f'{name}={value}' for name, value in self.settings.items())}")
        print(f"median [least to largest], ratio of the medians; reference: {reference}", flush=True)

    def record(
        self,
        what: str,
        sides: Mapping[str, Sequence[float]],
        *,
        unit: str = "",
        ratio: Ratio = "it / reference",
        reference: str | None = None,
        targets: Mapping[str, Sequence[Target]] | None = None,
    ) -> None:
        """Record the values of each side and print a line for each. Without the reference there is no ratio.

        `reference` replaces that of the benchmark. `targets` are bounds by side. Raises `ValueError` for a target of a
        ratio that does not exist.
        """
        named = reference or self.reference
        against = statistics.median(sides[named]) if named in sides else None
        print(what)
        for side, values in sides.items():
            median, least, largest = statistics.median(values), min(values), max(values)
            factor = _ratio(median, against, ratio)
            judged = tuple(_judge(target, side, median, factor) for target in (targets or {}).get(side, ()))
            self.figures.append(
                Figure(what, side, unit, median, least, largest, len(values), named, factor, ratio, judged)
            )
            suffix = "" if factor is None or side == named else f"  {ratio}: {factor:.3g}"
            suffix += "".join(f"  ({judgement})" for judgement in judged)
            print(f"  {side:<20} {median:>10,.4g} {unit} [{least:,.4g} to {largest:,.4g}]{suffix}", flush=True)

    def save(self) -> Path:
        """Write everything as JSON and print the path."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{self.benchmark}.json"
        document = {
            "benchmark": self.benchmark,
            "at_s": time.time(),
            "machine": self.machine,
            "settings": self.settings,
            "reference": self.reference,
            "figures": self.figures,
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
        print(f"written: {path}")
        return path


def _ratio(median: float, reference: float | None, ratio: Ratio) -> float | None:
    if not reference or not median:
        return None
    return median / reference if ratio == "it / reference" else reference / median


def _judge(target: Target, side: str, median: float, ratio: float | None) -> Judged:
    figure = median if target.of == "median" else ratio
    if figure is None:
        raise ValueError(f"{side}: the target is a ratio, but no side is the reference")
    return Judged(target, target.met(figure))


def describe_machine(packages: Sequence[str]) -> Machine:
    """Return CPUs, system, load and the versions of Python and of these packages."""
    return Machine(
        cpus=os.cpu_count() or 1,
        processor=_processor(),
        system=platform.platform(),
        load=os.getloadavg()[0],
        python=platform.python_version(),
        packages={name: version(name) for name in packages},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
