"""Recorded progress of ten steps, as view and report see it."""

from __future__ import annotations

from replaybuf.launch.processes import ProcessState
from replaybuf.launch.progress import Evaluation, GeneratorLine, Progress, TrainerLine

STEPS = 10


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
            train_s=0.6,
            publish_s=0.15,
            time=1000.0 + step,
        )
        for step in range(STEPS)
    )
    recorded.generated = [
        GeneratorLine(time=1000.0 + second, generated_tokens=3000 * second) for second in range(STEPS)
    ]
    for step, sampled, greedy in ((0, 0.25, 0.8), (4, 0.4, None), (10, 0.625, 0.85)):
        recorded.add_evaluation(Evaluation(step=step, problems=200, samples=4, sampled=sampled, greedy=greedy))
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
    recorded.add_processes(
        [
            ProcessState("serve", 11, "idle", 80_000_000, 90_000_000, 5.0),
            ProcessState("train", 12, "running", 400_000_000, 500_000_000, 8.5),
        ]
    )
    return recorded
