"""TRL's AsyncGRPOTrainer on a replaybuf run: rollout worker, weight transfer and callback.

::

    worker = ReplaybufRolloutWorker("http://127.0.0.1:8900", "main")
    trainer = AsyncGRPOTrainer(
        model="models/policy",
        args=AsyncGRPOConfig(token_budget=0, max_steps=100, ...),
        train_dataset=dataset,
        rollout_worker=worker,
        weight_transfer=ReplaybufWeightTransfer(worker, "models/policy", engines=["http://127.0.0.1:8001"]),
        callbacks=[ReplaybufCallback(worker)],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint("out"))
"""

from replaybuf_trl.callback import ReplaybufCallback
from replaybuf_trl.checkpoints import newest_checkpoint
from replaybuf_trl.cpu import allow_cpu
from replaybuf_trl.transfer import ReplaybufWeightTransfer
from replaybuf_trl.worker import ReplaybufRolloutWorker

__all__ = [
    "ReplaybufCallback",
    "ReplaybufRolloutWorker",
    "ReplaybufWeightTransfer",
    "allow_cpu",
    "newest_checkpoint",
]
