#!/usr/bin/env bash
# The experiment on real machines, beginning with their links.
#
#     ./scripts/measure_cluster.sh HOSTFILE FOLDER [OPTIONS OF ds-ckpt measure]
#
# Start it on the first host of the hostfile. Every host has this repository, Python and packages at
# the same path, and the first one reaches all others by ssh without a password. Where a host has
# several network interfaces: --interface eth0. Given again, it goes on where it was.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2
  exit 2
fi
hostfile=$1 folder=$2
shift 2
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
mkdir -p "$(dirname "$folder")"

if [ ! -e "$folder-links.json" ]; then
  # the experiment does not depend on the links
  "$venv/bin/ds-ckpt" probe --hostfile "$hostfile" --output "$folder-links.json" ||
    echo "the links were not probed, see above; going on without" >&2
fi
exec "$venv/bin/ds-ckpt" measure --hostfile "$hostfile" --output "$folder" "$@"
