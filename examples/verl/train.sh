#!/usr/bin/env bash
# Train Qwen3-4B with verl, where a replaybuf run selects the batches. Start it again after a crash, and it resumes.
#
#   replaybuf serve --data-dir data &
#   OUT=/root/out examples/verl/train.sh         # further options go to verl
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-out} model=${MODEL:-/root/Qwen3-4B} data=${DATA:-/root/gsm8k} run=${RUN:-main}
url=${REPLAYBUF_URL:-http://127.0.0.1:8900}

replaybuf runs create "$run" --url "$url" --from "$here/run.json" --if-absent

options=(
  trainer.v1.trainer_mode=colocate_async
  trainer.v1.sampler.custom_sampler.path=pkg://replaybuf_transferqueue.sampler
  trainer.v1.sampler.custom_sampler.name=ReplaybufSampler
  +trainer.v1.sampler.sampler_kwargs.url="$url"
  +trainer.v1.sampler.sampler_kwargs.run="$run"
  trainer.checkpoint_callback_class=replaybuf_transferqueue.sampler.CheckpointReport
  actor_rollout_ref.rollout.calculate_log_probs=True
  actor_rollout_ref.rollout.n=8
  data.train_batch_size=32
  data.max_prompt_length=1024 data.max_response_length=8192

  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet"
  algorithm.adv_estimator=grpo
  actor_rollout_ref.model.path="$model"
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.rollout.name=vllm
  trainer.n_gpus_per_node=8 trainer.nnodes=1
  trainer.save_freq=20 trainer.test_freq=20 trainer.total_epochs=3
  trainer.default_local_dir="$out" trainer.resume_mode=auto
)
python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
