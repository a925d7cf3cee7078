#!/usr/bin/env bash
# Installs axolotl, ms-swift and Lightning for tests/distributed/test_trainers.py, in .venv/trainers:
# apart from the packages of .venv, since they need other versions of those.
#
#     ./scripts/trainers.sh [--slow]
#
# Without --slow the three alone, and what their loaders of plugins import: 120 MB. With --slow also an
# environment with all that `axolotl train` needs, and one with all that `swift sft` needs: 3 GB.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
pinned="$root/constraints.txt"

# made NAME COMMAND...: runs it with a new folder and NAME, unless it has run with these versions.
made() {
  local place="$venv/trainers/$1" stamp
  stamp=$(cksum <"$pinned")
  [ "$(cat "$place/.installed" 2>/dev/null)" != "$stamp" ] || return 0
  rm -rf "$place"
  mkdir -p "$place"
  "${@:2}" "$place" "$1"
  echo "$stamp" >"$place/.installed"
}
install() { "$1/bin/python" -m pip -qq --disable-pip-version-check install "${@:2}"; }
alone() { install "$venv" --no-compile --no-deps --target "$1" -r <(sed '1,/trainers.sh/d' "$pinned"); }
whole() {
  above "$venv" "$1"
  install "$1" --upgrade pip # an old one seeks for an hour
  install "$1" "$(grep "^$2==" "$pinned")"
  # the one of torch starts the Python that torch is installed for
  printf '#!%s\nfrom torch.distributed.run import main\nmain()\n' "$1/bin/python" >"$1/bin/torchrun"
  chmod +x "$1/bin/torchrun"
}

made packages alone
[[ " $* " != *" --slow "* ]] || for name in axolotl ms-swift; do made "$name" whole; done
