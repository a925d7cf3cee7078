#!/usr/bin/env bash
# Train a small Llama on two emulated nodes with a slow link, as DeepSpeed does and with each feature
# of ds_ckpt, and report. It takes about 3 minutes after the set-up, and needs no root.
# The set-up takes about 6 minutes, once, and 1.4 GB in .venv; nothing else is changed.
# Options are those of `ds-ckpt measure --help`, which `--demo` presets.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n 's/^# //p' "$0" && exit ;; esac
after_s=160
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
printf 'demo: about %s s left\n' "$after_s"
exec "$venv/bin/ds-ckpt" measure --demo "$@"
