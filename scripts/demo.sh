#!/usr/bin/env bash
# Train a small Llama with checkpointing off and on, uncompressed and with Top-K, and report.
# Options are those of `ds-ckpt measure`: ./scripts/demo.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
exec "$venv/bin/ds-ckpt" measure --demo "$@"
