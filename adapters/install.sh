#!/usr/bin/env bash
# Install one adapter with the peer it serves in an environment of its own: install.sh PYTHON NAME FOLDER.
# Needs a package index. Versions are those of adapters/NAME/constraints.txt. Packages in adapters/NAME/no-deps.txt, if
# there is one, come without the dependencies that they ask for.
set -euo pipefail
python=$1 name=$2 venv=$3/$2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
adapter=$root/adapters/$name
mkdir -p "$3"
log=$3/$name.log

give_up() {
  tail -n 20 "$log" >&2 || true
  echo "the adapter $name cannot be installed here, so NOTHING WAS TESTED; see above and $log" >&2
  exit 1
}
trap give_up ERR

echo "installing $name into $venv. Details: $log"
rm -f "$venv/.installed"
"$python" -m venv "$venv" >"$log" 2>&1
"$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check --no-input \
  -c "$adapter/constraints.txt" -e "$root" -e "$adapter[test]" >>"$log" 2>&1
if [ -f "$adapter/no-deps.txt" ]; then
  "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check --no-input \
    --no-deps -r "$adapter/no-deps.txt" >>"$log" 2>&1
fi
touch "$venv/.installed"
