#!/usr/bin/env bash
# Runs the tests that need no root. Options go to pytest: ./scripts/test.sh -k topk
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
# Several processes share the cores: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd "$root"
exec "$venv/bin/python" -m pytest tests/unit tests/contract tests/distributed "$@"
