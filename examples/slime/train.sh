#!/usr/bin/env bash
# Train Qwen3-4B with slime on the groups of a replaybuf run. Start it again after a crash, and it resumes.
#
#   replaybuf serve --data-dir data &            # and producers of the run, such as `replaybuf generate`
#   ray start --head --num-gpus 8
#   OUT=/root/out examples/slime/train.sh        # in the folder of slime; further options go to train.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-out} model=${MODEL:-/root/Qwen3-4B} run=${RUN:-main}

replaybuf runs create "$run" --from "$here/run.json" --if-absent
mkdir -p "$out"
cat >"$out/replaybuf.yaml" <<YAML
replaybuf_url: ${REPLAYBUF_URL:-http://127.0.0.1:8900}
replaybuf_run: $run
replaybuf_steps_ahead: 0
replaybuf_deadline_s: 1800
YAML

options=(
  --rollout-function-path replaybuf_slime.generate_rollout
  --data-source-path replaybuf_slime.ReplaybufDataSource
  --custom-config-path "$out/replaybuf.yaml"
  --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
  --num-rollout 3000

  --eval-function-path slime.rollout.sglang_rollout.generate_rollout
  --hf-checkpoint "$model" --ref-load "${model}_torch_dist"
  --load "$out" --save "$out" --save-interval 20

  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2
  --tensor-model-parallel-size 2 --sequence-parallel
  --use-dynamic-batch-size --max-tokens-per-gpu 9216 --balance-data
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
  --use-rollout-logprobs # the ratio of the loss is to the engines that sampled, which may be some versions behind
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
  --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash
)
# shellcheck source=/dev/null
source scripts/models/qwen3-4B.sh # sets MODEL_ARGS
python3 train.py "${MODEL_ARGS[@]}" "${options[@]}" "$@"
