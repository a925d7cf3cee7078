#!/usr/bin/env bash
# Train a small Llama on two emulated nodes with a slow link, as DeepSpeed does and with each feature
# of ds_ckpt, and report. It takes about 3 minutes after the set-up, and needs no root.
# Options are those of `ds-ckpt measure`: ./scripts/demo.sh --help
set -euo pipefail
after_s=160
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
printf 'demo: about %s s left\n' "$after_s"
exec "$venv/bin/ds-ckpt" measure --demo "$@"
