#!/usr/bin/env bash
# Runs the tests that need no root. Options go to pytest: ./scripts/test.sh -k topk
# The slow tier waits for --slow: ./scripts/test.sh --slow runs everything.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
# Several processes share the cores: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd "$root"

# Half of the time of tests with several processes is waiting: three at once share two cores well.
exec "$venv/bin/python" -m pytest tests/unit tests/contract tests/distributed \
  --numprocesses 3 --dist worksteal "$@"
