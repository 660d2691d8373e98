#!/usr/bin/env bash
# Install a peer beside an environment that has the rest: install.sh PYTHON FOLDER PEER MODULE. Needs a package index.
# FOLDER/python is PYTHON with the packages of tests/PEER/requirements.txt; MODULE is imported to check it.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") folder=$2 peer=$3 module=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

give_up() {
  tail -n 20 "$folder/install.log" >&2 || true
  echo "$peer cannot be installed here, so NOTHING WAS TESTED with it; see above and $folder/install.log" >&2
  exit 1
}
trap give_up ERR

rm -rf "$folder"
mkdir "$folder"
folder=$(cd "$folder" && pwd)
echo "installing $peer into $folder. Details: $folder/install.log"
"$python" -m pip install --progress-bar off --disable-pip-version-check --no-input --target "$folder/packages" \
  --no-deps --no-compile -c "$here/../constraints.txt" -r "$here/$peer/requirements.txt" >"$folder/install.log" 2>&1
# Not compiled above: few of the files are ever imported, and those are compiled then, whatever the shell says.
cat >"$folder/python" <<SH
#!/bin/sh
PYTHONDONTWRITEBYTECODE= PYTHONPATH="$folder/packages:\$PYTHONPATH" exec "$python" "\$@"
SH
chmod +x "$folder/python"
"$folder/python" -c "import $module" >>"$folder/install.log" 2>&1
touch "$folder/.installed"
