#!/usr/bin/env bash
# Install the peers of benchmarks/peers.py, each into a virtual environment of its own: install.sh PYTHON FOLDER.
# Needs a package index. 3.2 GB. A peer that cannot be installed is named; the benchmark leaves it out.
set -euo pipefail
python=$1 folder=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$folder"

install() {
  local venv=$folder/$1 log=$folder/$1.log
  if [ "$venv/.installed" -nt "$here/$1.txt" ]; then return; fi
  rm -rf "$venv"
  "$python" -m venv "$venv"
  echo "installing $1 into $venv. Details: $log"
  "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check --no-input \
    -r "$here/$1.txt" >"$log" 2>&1 && touch "$venv/.installed"
}

for requirements in "$here"/*.txt; do
  peer=$(basename "$requirements" .txt)
  install "$peer" || { tail -n 5 "$folder/$peer.log" >&2; echo "$peer cannot be installed here; it is left out" >&2; }
done
