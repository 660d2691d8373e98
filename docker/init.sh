#!/bin/sh
# Make one token per role, once: hashes for serve, each token in the folder of its container. Compose runs this script.
set -eu
umask 077
secrets=${1:-/secrets}
for role in operator producer trainer reader; do
  file="$secrets/$role/token"
  if [ ! -s "$file" ]; then
    token=$(replaybuf tokens new --role "$role" --name "compose-$role" --tokens-file "$secrets/serve/tokens")
    printf '%s' "$token" > "$file.new"
    mv "$file.new" "$file"
  fi
done
# Prometheus runs as another user; only its container mounts this folder.
chmod 0755 "$secrets/reader"
chmod 0444 "$secrets/reader/token"
