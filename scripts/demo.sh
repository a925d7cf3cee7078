#!/usr/bin/env bash
# Trains a small Llama with checkpointing off and on, dense and Top-K, and reports.
# Options go to the demo: ./scripts/demo.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
exec "$venv/bin/python" -m ds_ckpt.cli.demo "$@"
