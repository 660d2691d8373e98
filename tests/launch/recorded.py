"""Recorded progress of ten steps, as view and report see it."""

from __future__ import annotations

from replaybuf.launch.processes import ProcessUse
from replaybuf.launch.progress import Evaluation, Example, GeneratorLine, Progress, StalenessLine, TrainerLine

STEPS = 10
PROBLEMS = 200


def recorded_progress() -> Progress:
    """Ten steps of one second each: 0.6 s training, 0.15 s publishing, 0.25 s waiting, 0.2 s of it explained."""
    recorded = Progress(seed=7, total_steps=STEPS)
    recorded.add_steps(
        TrainerLine(
            step=step,
            version=step,
            reward_mean=0.3 + 0.05 * step,
            tokens=4000,
            staleness_mean=0.5 if step else 0.0,
            staleness_max=1 if step else 0,
            wait_s=0.25,
            wait_reasons={"too_few_groups": 0.2},
            by_staleness={"1" if step else "0": StalenessLine(2000.0)},
            train_s=0.6,
            publish_s=0.15,
            time=1000.0 + step,
        )
        for step in range(STEPS)
    )
    recorded.generated = [
        GeneratorLine(
            time=1000.0 + second, generated_tokens=3000 * second, waiting="rate_limited" if second % 2 else None
        )
        for second in range(STEPS)
    ]
    for step, sampled, greedy in ((0, 0.25, 0.8), (4, 0.4, None), (10, 0.625, 0.85)):
        recorded.add_evaluation(recorded_evaluation(step, sampled, greedy))
    recorded.state = {
        "step": STEPS,
        "groups": {
            "stored": 350,
            "live": 20,
            "in_batches": 64,
            "retired": 256,
            "evicted": {"too_stale": 10},
            "dead_lettered": 0,
            "rejected": {},
        },
        "tokens": {"live": 2500},
    }
    recorded.add_uses([ProcessUse("serve", 90_000_000, 5.0), ProcessUse("train", 500_000_000, 8.5)])
    return recorded


def recorded_evaluation(step: int, sampled: float, greedy: float | None) -> Evaluation:
    """200 problems, of which the first ones are solved always and the others never; the first one as an example."""
    example = Example(
        prompt="abc>",
        answer="cba",
        greedy="cba" if step else "cb",
        greedy_right=step > 0,
        sampled=["cba", "<b>"],
        sampled_right=[True, False],
    )
    return Evaluation(
        step=step,
        problems=PROBLEMS,
        samples=4,
        sampled=sampled,
        sampled_error=0.03,
        sampled_by_problem=solved(sampled),
        greedy=greedy,
        greedy_error=None if greedy is None else 0.025,
        greedy_by_problem={} if greedy is None else solved(greedy),
        examples=[] if greedy is None else [example],
    )


def solved(share: float) -> dict[str, float]:
    """Return a score of 1 for the first problems and 0 for the others."""
    return {str(problem): float(problem < share * PROBLEMS) for problem in range(PROBLEMS)}
