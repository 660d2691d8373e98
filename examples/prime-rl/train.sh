#!/usr/bin/env bash
# Train with prime-rl on the groups of a replaybuf run. Start it again after a crash, and it resumes.
#
#   replaybuf serve --data-dir data &                          # and producers of the run, such as `replaybuf generate`
#   GPUS=4 ENGINE=http://127.0.0.1:8000 examples/prime-rl/train.sh     # in an environment that has prime-rl
#
# replaybuf and replaybuf-prime-rl may be in an environment of their own; put its `bin` last on PATH.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-outputs/main} run=${RUN:-main} gpus=${GPUS:-1}

replaybuf runs create "$run" --from "$here/run.json" --if-absent

# The files have a format of prime-rl's own, so its source is checked. This finds the package without importing it.
package=${PRIME_RL:-$(python -c 'from importlib.util import find_spec; print(*find_spec("prime_rl").submodule_search_locations)')}
replaybuf-prime-rl --run "$run" --output-dir "$out" --prime-rl "$package" --dp-world-size "$gpus" \
  ${ENGINE:+--engine "$ENGINE"} &
sidecar=$!
torchrun --nproc-per-node "$gpus" -m prime_rl.trainer.rl.train @ "$here/trainer.toml" --output-dir "$out" &
trainer=$!

trap 'kill $sidecar $trainer 2>/dev/null || true' EXIT
wait -n # a process that fails ends the script, and with it the other one
wait -n # both end with the last step of the run
