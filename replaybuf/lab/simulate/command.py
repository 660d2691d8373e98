"""The command `replaybuf simulate`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf.kernel.strategy.plugin_set import resolve_config
from replaybuf.lab.simulate.advice import (
    CANDIDATES,
    Advice,
    FleetOptions,
    advise,
    from_numbers,
    most_simulations,
)
from replaybuf.lab.simulate.figures import Figures
from replaybuf.lab.simulate.loop import simulate as run_simulation
from replaybuf.lab.simulate.picture import draw
from replaybuf.lab.simulate.recording import RecordedSupply, Recording, derive, read_file, read_service, save
from replaybuf.lab.simulate.report import Study, print_advice, print_study
from replaybuf.lab.simulate.workload import DEFAULT_GROUP_SIZE, Supply, Workload, check_prompts, check_workload
from replaybuf.launch.view import Report, work_bar
from replaybuf.plugins.entry_points import option_pairs
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec
from replaybuf.wire.decoding import decode_json

DEFAULT_GROUPS_PER_BATCH = 64
ADVISED_STEPS = 100
"""Most steps of each simulation of an advice."""
DEFAULT_TOKENS_PER_S = 2000.0
"""Of one generating GPU."""
MOST_STEPS = 10_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What to simulate, and where the report goes."""

    strategy: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """Strategy to simulate: NAME or NAME:KEY=VALUE,KEY=VALUE. Repeat the option to compare several. Default: the
    strategy of the run configuration."""
    option: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """KEY=VALUE: option of every simulated strategy. Repeat it for several options."""
    steps: int = 1000
    """Number of training steps; with --advise at most 100 per simulation."""
    seed: int = 0
    """Seed of lengths, rewards and failures; they are the same for all strategies."""
    config_run: Path | None = None
    """JSON file with the run configuration: the body of PUT /v1/runs/NAME."""
    from_: Annotated[str | None, Parameter(name="--from")] = None
    """Recorded run to take workload and configuration from: address of a service, or a file of --save-recording."""
    run: str | None = None
    """Name of the recorded run, if --from is an address."""
    token: str | None = None
    """Bearer token with the role reader, if --from is an address."""
    save_recording: Path | None = None
    """File to save the recorded run to; later simulations read it with --from."""
    report_dir: Path | None = None
    """Folder for report.json and report.png."""
    advise: Annotated[bool, Parameter(negative="")] = False
    """Propose strategy, staleness, slots and share of the engines, by a small grid of simulations. With --strategy,
    choose among those."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print JSON: the content of report.json, or the advice."""
    fleet: Annotated[FleetOptions, Parameter(name="*")] = dataclasses.field(default_factory=FleetOptions)
    """Machines of the run."""
    workload: Annotated[Workload, Parameter(name="*")] = dataclasses.field(default_factory=Workload)
    """Speeds and shape of the work."""


def simulate(options: Annotated[SimulateOptions, Parameter(name="*")] = SimulateOptions()) -> None:
    """Simulate a run to compare strategies: trainer waiting time, staleness and wasted groups.

    The simulation calls the service's own selection code with a simulated clock. Durations and groups are random, or
    come from a recorded run.
    """
    console = Console(stderr=options.json)
    _check_advise(options)
    if options.from_ is None:
        for name, value in (("--run", options.run), ("--save-recording", options.save_recording)):
            if value is not None:
                raise Invalid(f"{name} is {str(value)!r}; it needs --from", name=name, value=str(value), bound="--from")
    if options.report_dir:
        _make(options.report_dir)
    recording = _recording(options)
    if recording and options.save_recording:
        save(recording, options.save_recording)
    if options.advise:
        print_advice(console, run_advice(options, _run_config(options.config_run, recording), recording), options.json)
        return
    study = run_study(options, _run_config(options.config_run, recording), recording)
    paths = _write(study, options.report_dir, console) if options.report_dir else []
    if options.json:
        print(msgspec.json.encode(study).decode())
    else:
        print_study(console, study, paths)


def check_steps(options: SimulateOptions) -> None:
    """Raise `Invalid` for a number of steps or a seed out of bounds."""
    for name, value, low in (("steps", options.steps, 1), ("seed", options.seed, 0)):
        if not low <= value <= MOST_STEPS:
            raise Invalid(
                f"{name} is {value}; it must be in {low}..{MOST_STEPS}", name=name, value=value, bound=[low, MOST_STEPS]
            )


def run_study(options: SimulateOptions, config: RunConfig, recording: Recording | None = None) -> Study:
    """Simulate every strategy. Raises `Invalid` before the first one starts, `StrategyFault`."""
    steps, seed = options.steps, options.seed
    check_steps(options)
    workload = derive(recording, options.workload) if recording else options.workload
    changes = option_pairs(list(options.option))
    specs = [_spec(text, changes) for text in options.strategy]
    specs = specs or [StrategySpec(name=config.strategy.name, options=config.strategy.options | changes)]
    configs = [msgspec.structs.replace(config, strategy=spec, max_steps=None) for spec in specs]
    for variant in configs:
        resolve_config(variant)
    check_workload(workload)
    if recording is None:
        check_prompts(workload, config)
    runs: list[Figures] = []
    with work_bar("simulating") as report:
        for variant in configs:
            supply = (
                RecordedSupply(recording, workload, variant, seed) if recording else Supply(workload, variant, seed)
            )
            on_step = functools.partial(_report_step, report, len(runs) * steps, len(configs) * steps)
            runs.append(run_simulation(variant, supply, steps, on_step))
    return Study(
        seed=seed,
        steps=steps,
        workload=dataclasses.asdict(workload),
        config=msgspec.to_builtins(config),
        recorded=recording.run if recording else None,
        runs=runs,
    )


def run_advice(options: SimulateOptions, config: RunConfig, recording: Recording | None = None) -> Advice:
    """Simulate the grid of `--advise`. Raises as `run_study`, and `Invalid` for a fleet that cannot be split."""
    check_steps(options)
    workload = derive(recording, options.workload) if recording else options.workload
    check_workload(workload)
    fleet = options.fleet
    if recording is None or fleet.tokens_per_s is not None:
        check_prompts(workload, config)
        workload = from_numbers(workload, config, fleet, fleet.tokens_per_s or DEFAULT_TOKENS_PER_S)
    changes = option_pairs(list(options.option))
    specs = [_spec(text, changes) for text in options.strategy] or list(CANDIDATES)
    for spec in specs:
        resolve_config(msgspec.structs.replace(config, strategy=spec, max_steps=None))
    count, steps = most_simulations(fleet, specs), min(options.steps, ADVISED_STEPS)
    with work_bar("simulating") as report:
        runs = itertools.count()

        def run(config: RunConfig, at: Workload) -> Figures:
            supply = (
                RecordedSupply(recording, at, config, options.seed) if recording else Supply(at, config, options.seed)
            )
            on_step = functools.partial(_report_step, report, next(runs) * steps, count * steps)
            return run_simulation(config, supply, steps, on_step)

        return advise(workload, config, fleet, specs, run)


def _check_advise(options: SimulateOptions) -> None:
    if options.advise:
        return
    for field in dataclasses.fields(FleetOptions):
        if getattr(options.fleet, field.name) != field.default:
            name = f"--{field.name.replace('_', '-')}"
            raise Invalid(f"{name} needs --advise", name=name, value=getattr(options.fleet, field.name))


def _report_step(report: Report, before: int, total: int, step: int) -> None:
    report(before + step, total)


def _recording(options: SimulateOptions) -> Recording | None:
    source = options.from_
    if source is None:
        return None
    if "://" not in source:
        return read_file(Path(source))
    if options.run is None:
        raise Invalid(f"--from {source} needs --run with the name of the run", name="run", value=None, bound="a name")
    return read_service(source, options.run, options.token)


def _run_config(path: Path | None, recording: Recording | None) -> RunConfig:
    if path is not None:
        try:
            body = read_bounded(path, CONFIG_BYTES)
        except OSError as error:
            raise Invalid(f"run configuration {path} cannot be read: {error}", name="config-run") from error
        return decode_json(body, RunConfig)
    if recording is not None:
        return recording.config
    batch = BatchSpec(tokens_per_batch=None, groups_per_batch=DEFAULT_GROUPS_PER_BATCH)
    return RunConfig(batch=batch, group_size=DEFAULT_GROUP_SIZE)


def _spec(text: str, options: dict[str, Any]) -> StrategySpec:
    name, _, changes = text.partition(":")
    return StrategySpec(name=name, options=options | option_pairs(changes.split(",") if changes else []))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(
            f"report folder {folder} cannot be created: {error.strerror}", name="report_dir", value=str(folder)
        ) from error


def _write(study: Study, folder: Path, console: Console) -> list[str]:
    """Write the report files; return their paths. Without matplotlib there is no picture."""
    report, picture = folder / "report.json", folder / "report.png"
    report.write_bytes(msgspec.json.format(msgspec.json.encode(study)) + b"\n")
    try:
        draw(study, picture)
    except MissingExtra as error:
        console.print(error.detail, highlight=False, markup=False, soft_wrap=True)
        return [str(report)]
    return [str(report), str(picture)]
