#!/usr/bin/env bash
# Install verifiers beside an environment that has the rest: install.sh PYTHON FOLDER. Needs a package index.
# FOLDER/python is PYTHON with verifiers.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") folder=$2
here=$(dirname "${BASH_SOURCE[0]}")

give_up() {
  tail -n 20 "$folder/install.log" >&2 || true
  echo "verifiers cannot be installed here, so NOTHING WAS TESTED on it; see above and $folder/install.log" >&2
  exit 1
}
trap give_up ERR

rm -rf "$folder"
mkdir "$folder"
folder=$(cd "$folder" && pwd)
echo "installing verifiers into $folder, 105 MB. Details: $folder/install.log"
"$python" -m pip install --progress-bar off --disable-pip-version-check --no-input --target "$folder/packages" \
  --no-deps --no-compile -c "$here/../../constraints.txt" -r "$here/requirements.txt" >"$folder/install.log" 2>&1
# Not compiled above: few of the 5,700 files are ever imported, and those are compiled then, whatever the shell says.
cat >"$folder/python" <<SH
#!/bin/sh
PYTHONDONTWRITEBYTECODE= PYTHONPATH="$folder/packages:\$PYTHONPATH" exec "$python" "\$@"
SH
chmod +x "$folder/python"
"$folder/python" -c 'import verifiers.v1' >>"$folder/install.log" 2>&1
touch "$folder/.installed"
