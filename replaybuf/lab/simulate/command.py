"""The command `replaybuf simulate`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console

from replaybuf.errors import Invalid, MissingExtra
from replaybuf.kernel.plugin_set import resolve_config
from replaybuf.kernel.plugins import option_pairs
from replaybuf.lab.simulate.loop import simulate as run_simulation
from replaybuf.lab.simulate.picture import draw
from replaybuf.lab.simulate.recording import RecordedSupply, Recording, derive, read_file, read_service, save
from replaybuf.lab.simulate.report import Study, print_study
from replaybuf.lab.simulate.workload import DEFAULT_GROUP_SIZE, Supply, Workload, check_prompts, check_workload
from replaybuf.wire.config import BatchSpec, RunConfig, StrategySpec
from replaybuf.wire.decoding import decode_json

DEFAULT_GROUPS_PER_BATCH = 64
MOST_STEPS = 10_000_000


def simulate(
    *,
    strategy: Annotated[list[str], Parameter(negative="")] = [],  # noqa: B006 cyclopts never changes it
    option: Annotated[list[str], Parameter(negative="")] = [],  # noqa: B006
    steps: int = 1000,
    seed: int = 0,
    config_run: Path | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    run: str | None = None,
    token: str | None = None,
    save_recording: Path | None = None,
    report_dir: Path | None = None,
    workload: Annotated[Workload | None, Parameter(name="*")] = None,
) -> None:
    """Study strategies with a virtual clock: what the trainer would wait for, how stale, how much for nothing.

    The decisions are made by the code of the service; only time and groups are made up, or read off a recorded run.

    Parameters
    ----------
    strategy
        Strategy to study, NAME or NAME:KEY=VALUE,KEY=VALUE; several are shown side by side. By default that of the
        run's configuration.
    option
        Option KEY=VALUE for every strategy named.
    steps
        Training steps to simulate.
    seed
        Decides lengths, rewards and failures, the same ones for every strategy.
    config_run
        JSON file with the configuration of the run, as PUT /v1/runs/NAME takes it.
    from_
        Learn workload and configuration from a recorded run: address of its service, or a file saved before.
    run
        Name of the recorded run, where --from is an address.
    token
        Bearer token with the role reader, for that service.
    save_recording
        File to keep the recorded run in, for later studies without its service.
    report_dir
        Folder for report.json and report.png.
    workload
        Speeds and shape of the work.
    """
    console = Console()
    if from_ is None:
        for name, given in (("--run", run), ("--save-recording", save_recording)):
            if given is not None:
                raise Invalid(
                    f"{name} is {str(given)!r} without --from; it is of a recorded run", name=name, value=given
                )
    if report_dir:
        _make(report_dir)
    recording = _recording(from_, run, token)
    if recording and save_recording:
        save(recording, save_recording)
    study = study_of(
        strategy,
        option,
        steps=steps,
        seed=seed,
        config=_run_config(config_run, recording),
        recording=recording,
        workload=workload or Workload(),
    )
    print_study(console, study, _write(study, report_dir, console) if report_dir else [])


def study_of(
    strategies: list[str],
    options: list[str],
    *,
    steps: int,
    seed: int,
    config: RunConfig,
    recording: Recording | None,
    workload: Workload,
) -> Study:
    """Run every strategy. Raises `Invalid` for what cannot be, before the first one begins; `StrategyFault`."""
    for name, value, low in (("steps", steps, 1), ("seed", seed, 0)):
        if not low <= value <= MOST_STEPS:
            raise Invalid(
                f"{name} is {value}; it must be in {low}..{MOST_STEPS}", name=name, value=value, bound=[low, MOST_STEPS]
            )
    known = derive(recording, workload) if recording else workload
    changes = option_pairs(options)
    specs = [_spec(text, changes) for text in strategies]
    specs = specs or [StrategySpec(name=config.strategy.name, options=config.strategy.options | changes)]
    configs = [msgspec.structs.replace(config, strategy=spec, max_steps=None) for spec in specs]
    for one in configs:
        resolve_config(one)
    check_workload(known)
    if recording is None:
        check_prompts(known, config)
    runs = []
    for one in configs:
        supply = RecordedSupply(recording, known, one, seed) if recording else Supply(known, one, seed)
        runs.append(run_simulation(one, supply, steps))
    return Study(
        seed=seed,
        steps=steps,
        workload=dataclasses.asdict(known),
        config=msgspec.to_builtins(config),
        recorded=recording.run if recording else None,
        runs=runs,
    )


def _recording(source: str | None, run: str | None, token: str | None) -> Recording | None:
    if source is None:
        return None
    if "://" not in source:
        return read_file(Path(source))
    if run is None:
        raise Invalid(f"--from {source} needs --run with the name of the run", name="run", value=None, bound="a name")
    return read_service(source, run, token)


def _run_config(path: Path | None, recording: Recording | None) -> RunConfig:
    if path is not None:
        try:
            body = path.read_bytes()
        except OSError as error:
            raise Invalid(f"run configuration {path} cannot be read: {error}", name="config-run") from error
        return decode_json(body, RunConfig)
    if recording is not None:
        return recording.config
    batch = BatchSpec(tokens_per_batch=None, groups_per_batch=DEFAULT_GROUPS_PER_BATCH)
    return RunConfig(batch=batch, group_size=DEFAULT_GROUP_SIZE)


def _spec(text: str, options: dict[str, Any]) -> StrategySpec:
    name, _, own = text.partition(":")
    return StrategySpec(name=name, options=options | option_pairs(own.split(",") if own else []))


def _make(folder: Path) -> None:
    """Make the folder of the report, before anything is simulated. Raises `Invalid`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(
            f"report folder {folder} cannot be made: {error.strerror}", name="report_dir", value=str(folder)
        ) from error


def _write(study: Study, folder: Path, console: Console) -> list[str]:
    report, picture = folder / "report.json", folder / "report.png"
    report.write_bytes(msgspec.json.format(msgspec.json.encode(study)) + b"\n")
    try:
        draw(study, picture)
    except MissingExtra as error:  # the figures stand without their picture
        console.print(error.detail, highlight=False, markup=False, soft_wrap=True)
        return [str(report)]
    return [str(report), str(picture)]
