#!/usr/bin/env bash
# Runs the tests that need no root. Options go to pytest: ./scripts/test.sh -k topk
# The slow tier waits for --slow: ./scripts/test.sh --slow runs everything.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
# Several processes share the cores: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd "$root"

# tests OPTION...: those that the options choose, if any.
tests() {
  local code=0
  "$venv/bin/python" -m pytest "$@" || code=$?
  [ "$code" = 5 ] && return # none was chosen; with CI=true a run of which none passes fails
  ran=1
  [ "$code" = 0 ] || failed=$code
}

ran=0 failed=0
# Tests of one process share the cores; the others use them all.
tests tests/unit tests/contract --numprocesses 2 --dist worksteal "$@"
tests tests/distributed "$@"
if [ "$ran" = 0 ]; then
  echo "no test was chosen"
  exit 5
fi
exit "$failed"
