#!/usr/bin/env bash
# The whole experiment on emulated hosts, twice, and how far the two runs are apart. Needs root.
#
#     sudo ./scripts/measure_here.sh [FOLDER]        default: runs/here
#
# 2 hosts x 1 process and 2 x 2, at 50, 200 and 1000 Mbit/s and not shaped. On 2 cores with nothing
# else running a run takes about 35 minutes for 2x1 and 60 for 2x2, twice each. It may be stopped at
# any time: given again, it goes on where it was. ROUNDS=8 makes the intervals narrower, LAYOUTS=2x1
# leaves the other out, SHAPE=hidden_size=192,layers=4 is a smaller model.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
folder=${1:-$root/runs/here}
mkdir -p "$folder"
failed=0

for layout in ${LAYOUTS:-2x1 2x2}; do
  for run in 1 2; do
    "$venv/bin/ds-ckpt" measure --output "$folder/$layout-$run" \
      --hosts "${layout%x*}" --slots "${layout#*x}" --rates 50mbit,200mbit,1gbit,unlimited \
      --repetitions "${ROUNDS:-5}" --shape "${SHAPE:-}" --stall-s 300
  done
  "$venv/bin/ds-ckpt" report "$folder/$layout-1" --against "$folder/$layout-2" || failed=1
done
exit "$failed"
