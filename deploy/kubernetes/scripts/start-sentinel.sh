#!/bin/sh
# Start a sentinel. It writes what it knows into its file of settings, which stays on the volume of the pod.
set -eu
data=${DATA:-/data}
primary="valkey-0.$SERVICE"
until getent hosts "$primary" >/dev/null; do sleep 1; done
if [ ! -f "$data"/sentinel.conf ]; then
  cat >"$data"/sentinel.conf.new <<EOF
port 26379
dir /tmp
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $HOSTNAME.$SERVICE
sentinel monitor replaybuf $primary 6379 2
sentinel auth-pass replaybuf $VALKEY_PASSWORD
sentinel down-after-milliseconds replaybuf 1500
sentinel failover-timeout replaybuf 10000
sentinel parallel-syncs replaybuf 1
EOF
  mv "$data"/sentinel.conf.new "$data"/sentinel.conf
fi
exec valkey-server "$data"/sentinel.conf --sentinel
