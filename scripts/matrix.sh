#!/usr/bin/env bash
# Runs the contract and the laws with several versions of what the plugin stands on, and writes
# docs/support.md.
#
#     ./scripts/matrix.sh [ROW...]        default: every row below
#
# Environments and results are kept in .matrix/: given again, it goes on where it was, and a row that
# is named is run anew. What cannot be installed fails its row alone. pip's own settings apply; a
# torch that is built for CUDA takes about 5 GB. A Python is looked for on the PATH and in pyenv.
# A row without versions stands on .venv. With 2 cores a row takes about six minutes. The row `ci` does
# without DeepSpeed's operator of the CPU, which takes as long to compile as its tests run.
set -euo pipefail

# name     Python torch  transformers DeepSpeed tests
rows='
oldest     3.10   2.9.0  4.57.6       0.18.5    short
middle     3.12   2.9.0  5.0.0        0.19.3    short
newest     3.13   2.15.0 5.24.0       0.19.8    short
0.19.5     -      -      -            0.19.5    laws
0.18.9     -      -      -            0.18.9    short
0.18.5     -      -      -            0.18.5    laws
0.18.4     -      -      -            0.18.4    none
0.18.0     -      -      -            0.18.0    none
torch-2.7  3.10   2.7.1  4.57.6       0.18.5    none
ci         -      -      -            0.18.5    few
'
none=() # the plugin refuses
few=(
  tests/contract/test_deepspeed_compatibility.py
  tests/distributed/test_gather.py
)
short=(
  tests/contract/test_deepspeed_compatibility.py
  tests/unit/test_{exchange,feedback,recompute}.py
  tests/distributed/test_{gather,compression}.py
)
laws=(
  tests/contract
  tests/unit/test_{exchange,feedback,recompute,policies}.py
  tests/distributed/test_{session,gather,compression,weights}.py
)

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
folder=$(realpath -m "$root/.matrix") # it may be a link to a larger disk
results="$folder/results"
mkdir -p "$results"
export PYTHONPATH="$root" # also where the package cannot be installed, as its torch is refused
unset TORCH_EXTENSIONS_DIR # each environment compiles DeepSpeed's operators for itself
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd "$root"

find_python() {
  local python
  for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$python" -c 'import ensurepip' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  echo "no Python $1 with ensurepip was found" >&2
  return 1
}

# base PYTHON TORCH TRANSFORMERS TESTS: prints the environment with these, which it makes. DeepSpeed is
# built with the torch that is there; alone it would fetch another.
base() {
  local base="$folder/python$1-torch$2-transformers$3" python packages=(-e "$root[hf,mpi,report,dev]")
  [ "$4" != none ] || packages=(deepspeed safetensors)
  if [ ! -f "$base/.ready" ]; then
    python=$(find_python "$1") && "$python" -m venv "$base" || return
    "$base/bin/python" -m pip --quiet install --upgrade pip >&2 || return # an old one seeks for an hour
    "$base/bin/python" -m pip --quiet install "torch==$2" 'setuptools>=77,<82' >&2 &&
      "$base/bin/python" -m pip --quiet install --no-build-isolation "torch==$2" \
        "transformers==$3" "${packages[@]}" >&2 || return
    touch "$base/.ready"
  fi
  echo "$base"
}

# environment NAME BASE DEEPSPEED: one of its own for DeepSpeed, above the base.
environment() {
  local place="$folder/$1"
  [ ! -f "$place/.ready" ] || return 0
  above "$2" "$place" --without-pip || return
  "$place/bin/python" -m pip --quiet install --no-deps --no-build-isolation "deepspeed==$3" || return
  touch "$place/.ready"
}

# row NAME PYTHON TORCH TRANSFORMERS DEEPSPEED TESTS
row() {
  local name=$1 base="$venv" python="$folder/$1/bin/python" result="$results/$1"
  [ "$2" = - ] || base=$(base "$2" "$3" "$4" "$6") || return
  environment "$name" "$base" "$5" || return
  local PATH="$base/bin:$PATH" # for ninja
  rm -f "$result".*
  echo "$6" >"$result.set"
  "$python" scripts/support.py versions >"$result.versions" || return
  if ! "$python" scripts/support.py contract >"$result.refused"; then
    cat "$result.refused"
    [ "$6" = none ] # who is refused runs no tests: right only where none were to run
    return
  fi
  local -n tests=$6
  if [ "${#tests[@]}" = 0 ]; then
    echo "$name: not refused, and no tests are named"
    return 1
  fi
  [ "$name" != ci ] || export DS_CKPT_TESTS_WITHOUT_OPERATOR=1
  "$python" -m pytest "${tests[@]}" -q --numprocesses 2 --dist worksteal \
    -p no:cacheprovider --junitxml="$result.xml"
}

for name in "$@"; do
  if ! awk -v name="$name" '$1 == name { found = 1 } END { exit !found }' <<<"$rows"; then
    echo "$name: no such row; the table in $0 names them" >&2
    exit 2
  fi
done
failed=0
while read -r name rest; do
  [ -n "$name" ] || continue
  if [ $# = 0 ]; then
    [ "$name" != ci ] && [ ! -f "$results/$name.done" ] || continue
  else
    [[ " $* " = *" $name "* ]] || continue
  fi
  printf '===== %s: %s\n' "$name" "$rest"
  # shellcheck disable=SC2086
  if row "$name" $rest </dev/null; then
    touch "$results/$name.done"
  else
    failed=1
  fi
done <<<"$rows"
[ "$*" = ci ] || "$venv/bin/python" scripts/support.py write "$results"
exit "$failed"
