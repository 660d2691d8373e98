#!/usr/bin/env bash
# Install one adapter with the peer it serves in an environment of its own: install.sh PYTHON NAME FOLDER.
# Needs a package index. Versions are those of adapters/NAME/constraints.txt. Packages in adapters/NAME/no-deps.txt, if
# there is one, come without the dependencies that they ask for; those in source.txt are built in the environment.
# The environment finds packages of PYTHON too, and installs only those that PYTHON lacks or has in another version: torch
# alone is 750 MB. With ADAPTERS_FRESH=1 it installs all of them, as a user does: so before a release.
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
"$python" -m venv --clear --without-pip "$venv" >"$log" 2>&1
if [ -z "${ADAPTERS_FRESH:-}" ]; then
  purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$python" -c "$purelib" >"$("$venv/bin/python" -c "$purelib")/of_python.pth"
fi
pip_install() {
  "$python" -m pip --python "$venv/bin/python" install \
    --progress-bar off --disable-pip-version-check --no-input "$@" >>"$log" 2>&1
}
pip_install -c "$adapter/constraints.txt" -e "$root" -e "$adapter[test]"
if [ -f "$adapter/no-deps.txt" ]; then
  pip_install --no-deps -r "$adapter/no-deps.txt"
fi
if [ -f "$adapter/source.txt" ]; then
  pip_install --no-deps --no-build-isolation -r "$adapter/source.txt"
fi
touch "$venv/.installed"
