#!/usr/bin/env bash
# Install TRL beside an environment that has the rest: install.sh PYTHON FOLDER. Needs a package index.
# FOLDER/python is PYTHON with TRL.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") folder=$2
here=$(dirname "${BASH_SOURCE[0]}")

give_up() {
  tail -n 20 "$folder/install.log" >&2 || true
  echo "TRL cannot be installed here, so NOTHING WAS COMPARED with it; see above and $folder/install.log" >&2
  exit 1
}
trap give_up ERR

rm -rf "$folder"
mkdir "$folder"
folder=$(cd "$folder" && pwd)
echo "installing TRL into $folder, 12 MB. Details: $folder/install.log"
"$python" -m pip install --progress-bar off --disable-pip-version-check --no-input --target "$folder/packages" \
  --no-deps --no-compile -c "$here/../../constraints.txt" -r "$here/requirements.txt" >"$folder/install.log" 2>&1
cat >"$folder/python" <<SH
#!/bin/sh
PYTHONDONTWRITEBYTECODE= PYTHONPATH="$folder/packages:\$PYTHONPATH" exec "$python" "\$@"
SH
chmod +x "$folder/python"
"$folder/python" -c 'import trl.trainer.grpo_trainer' >>"$folder/install.log" 2>&1
touch "$folder/.installed"
