#!/bin/sh
# Start a Valkey as a replica of the primary, or as the primary. Sentinel knows which; the own sentinel keeps a copy of
# what it knew, for the case that all pods start at once. Without both this is the first start: pod 0 is the primary.
set -eu
data=${DATA:-/data}
settings=${SETTINGS:-/etc/valkey}
me="$HOSTNAME.$SERVICE"
primary=""
for number in 0 1 2; do
  if [ -z "$primary" ]; then
    primary=$(timeout 2 valkey-cli -h "valkey-$number.$SERVICE" -p 26379 --raw \
      sentinel get-master-addr-by-name replaybuf 2>/dev/null | head -n 1) || primary=""
  fi
done
if [ -z "$primary" ] && [ -f "$data"/sentinel.conf ]; then
  primary=$(sed -n 's/^sentinel monitor replaybuf "\{0,1\}\([^ "]*\)"\{0,1\} .*/\1/p' "$data"/sentinel.conf)
fi
primary=${primary:-valkey-0.$SERVICE}
# Sentinel writes into the file, so each start copies it anew.
cp "$settings"/valkey.conf "$data"/valkey.conf
{
  echo "dir $data"
  echo "requirepass $VALKEY_PASSWORD"
  echo "masterauth $VALKEY_PASSWORD"
  echo "replica-announce-ip $me"
  if [ "$primary" != "$me" ]; then
    echo "replicaof $primary 6379"
  fi
} >>"$data"/valkey.conf
exec valkey-server "$data"/valkey.conf
