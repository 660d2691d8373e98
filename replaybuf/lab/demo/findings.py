"""Sentences about a demo. Each is computed from the figures, so none claims more than was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from replaybuf.errors import counted
from replaybuf.lab.demo.changes import MEASURED_ERRORS, points
from replaybuf.lab.demo.report import Report
from replaybuf.launch.view import clock, percent
from replaybuf.wire.wait_reasons import WAIT_REASONS

SMALL_SHARE = 0.05
"""A part that waits less than this share of its time is not held up."""
_ACTORS = {
    "producers": "for the generator",
    "trainer": "for its own ack or publication",
    "operator": "for an operator",
    "nothing": "for the end of the run",
}
TRAINER_WAITS = {"fetching": "for the service, which was sending the batch"} | {
    name: _ACTORS[reason.blocked_on] for name, reason in WAIT_REASONS.items()
}
"""For whom the trainer waits, by reason."""
GENERATOR_WAITS = {
    "rate_limited": "for the trainer: the buffer held all groups that the next steps may use",
    "awaiting_publication": "for new weights of the trainer",
    "paused": "for an operator, who paused the run",
}
"""For whom the generator waits, by reason."""


def headline(report: Report, separator: str = ", ") -> str:
    """Return the result in one sentence, its parts separated by `separator`."""
    parts = [
        f"{name} accuracy {percent(pair.before)} → {percent(pair.after)}{_verdict(report, name)}"
        for name, pair in (("sampled", report.accuracy.sampled), ("greedy", report.accuracy.greedy))
    ]
    return f"{separator.join(parts)}, {counted(report.steps, 'step')} in {clock(report.wall_s)}"


def findings(report: Report) -> tuple[str, ...]:
    """Return what was found, and what a reader must know to judge it."""
    return (*_learning(report), _staleness(report), *_waits(report), *_conditions(report))


def _verdict(report: Report, name: str) -> str:
    change = report.changes.get(name)
    if change is None or change.error is None:
        return ""
    return f" ({points(change)})" if change.direction else f" ({points(change)}: no measurable change)"


def _learning(report: Report) -> Iterator[str]:
    sampled, greedy = report.changes.get("sampled"), report.changes.get("greedy")
    if sampled:
        yield sampled.describe("Sampled accuracy (temperature 1)")
    if greedy:
        yield greedy.describe("Greedy accuracy (temperature 0)")
    if sharpened := report.changes.get("sampled - greedy"):
        gap = points(sharpened)
        if sharpened.direction > 0:
            yield (
                f"Sampled accuracy gained more than greedy accuracy ({gap} points): reinforcement learning has mostly "
                "sharpened what the model could already do."
            )
        elif sharpened.direction < 0:
            yield f"Greedy accuracy gained more than sampled accuracy ({gap} points for sampled minus greedy)."
        else:
            yield f"Sampled accuracy did not gain measurably more than greedy accuracy ({gap} points)."
    if reward := report.changes.get("reward"):
        yield (
            f"{reward.describe('Mean reward of a trained batch, in % of full marks,')} "
            "This compares the first quarter of the steps with the last; the error is over steps."
        )


def _staleness(report: Report) -> str:
    shares = [
        f"{percent(share)} were {age} version{'' if age == '1' else 's'} old"
        for age, share in sorted(report.staleness_shares.items(), key=lambda item: int(item[0]))
    ]
    stale = report.groups.dropped.get("too_stale", 0)
    bound = report.hyperparameters["run"].get("max_staleness")
    allowed = "" if bound is None else f" The run allows at most {bound}."
    return (
        f"Staleness: of the trained tokens {', '.join(shares) or 'none were counted'}.{allowed} "
        f"Dropped because too stale: {counted(stale, 'group', f'{stale:,}')}."
    )


def _waits(report: Report) -> Iterator[str]:
    trainer, generator = report.waiting.by_reason, report.generator_waiting
    yield (
        f"The trainer waited {percent(report.waiting.share)} of its time"
        f"{_reasons({r: s for r, s in trainer.items() if s >= 0.0005}, TRAINER_WAITS)}."
    )
    if generator.reports:
        yield (
            f"The generator waited in {percent(generator.share)} of its {generator.reports:,} reports"
            f"{_reasons(generator.by_reason, GENERATOR_WAITS)}."
        )
        for_generator = sum(
            share for reason, share in trainer.items() if "the generator" in TRAINER_WAITS.get(reason, "")
        )
        if max(for_generator, generator.share) < SMALL_SHARE:
            yield "Neither part held up the other."
        elif generator.share > for_generator:
            yield "So the trainer set the pace."
        else:
            yield "So the generator set the pace."


def _conditions(report: Report) -> Iterator[str]:
    before = report.accuracy.sampled.before
    yield (
        "The model did not start from nothing: before any reinforcement learning, a short supervised warm start on "
        f"the training problems brought its sampled accuracy on the held-out problems to {percent(before)}. "
        "Everything after that comes from rewards only."
    )
    problems = report.evaluations[0]
    yield (
        f"Accuracy is the share of completions that get full marks from the environment's own scorer, on "
        f"{counted(problems.problems, 'held-out problem')} never trained on: "
        f"{counted(problems.samples, 'completion')} each, or the greedy one. "
        "± is one standard error over these problems, each compared with itself. "
        f"A change counts as measured from {MEASURED_ERRORS:g} standard errors on."
    )
    yield "This is one run with one seed: another seed gives other figures, and the errors do not cover that."


def _reasons(shares: Mapping[str, float], explained: Mapping[str, str]) -> str:
    named = ((percent(share), explained.get(reason, ""), f"[{reason}]") for reason, share in shares.items())
    parts = [" ".join(filter(None, words)) for words in named]
    return f": {', '.join(parts)}" if parts else ""
