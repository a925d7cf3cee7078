# Sourced by test.sh, demo.sh and others: makes or reuses .venv and installs the project into it.
#
# PYTHON names the Python to make .venv with (default: python3). pip's own settings and
# environment variables apply as ever. Installs only when pyproject.toml or constraints.txt have
# changed since the last time. Its lines have the time left, with after_s seconds for what follows.
set -euo pipefail

# Hundreds of processes would compile the same Python files.
unset PYTHONDONTWRITEBYTECODE

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
make_s=10 torch_s=35 packages_s=60 compile_s=75 # usual durations
left_s=$((make_s + torch_s + packages_s + compile_s + ${after_s:-0}))

fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

during() {
  # during SECONDS TEXT COMMAND...: runs it, and prints a line at once and every 10 s.
  local often_s=$1 text=$2 begun=$SECONDS running left about mb
  shift 2
  left_s=$((left_s - often_s))
  set -m # a process group of its own, so that all of it can be ended
  "$@" </dev/null &
  running=$!
  set +m
  trap 'kill -- "-$running" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$running" 2>/dev/null; do
    left=$((often_s - SECONDS + begun)) about=about
    [ "$left" -gt 5 ] || left=5 about='at least'
    mb=$(du -sm "$venv" 2>/dev/null | cut -f 1) || true
    printf 'setup: %s, %s MB on disk, %s %s s left in all\n' \
      "$text" "${mb:-0}" "$about" "$((left_s + left))"
    for _ in 1 2 3 4 5 6 7 8 9 10; do ! kill -0 "$running" 2>/dev/null || sleep 1; done
  done
  trap - INT TERM
  wait "$running"
}

digest() {
  # POSIX, and the same on every system. An environment that was copied, or whose Python was
  # replaced, is installed into anew.
  { cat "$root/pyproject.toml" "$root/constraints.txt" && echo "$root" && "$venv/bin/python" -V; } | cksum
}

make_venv() {
  local python=${PYTHON:-python3}
  command -v "$python" >/dev/null ||
    fail "no $python found." "Install Python 3.10 or newer, or name one: PYTHON=/path/to/python $0"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version) is too old: 3.10 or newer is needed." \
      "Name a newer one: PYTHON=python3.12 $0"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments (no venv or ensurepip)." \
      "Install that part of Python (on Debian and Ubuntu: the package python3-venv)."
  during "$make_s" "making $venv" "$python" -m venv --clear "$venv" ||
    fail "python -m venv failed, see above."
}

check_compiler() {
  # DeepSpeed compiles a CPU operator with torch's tools when it first starts.
  command -v "${CXX:-c++}" >/dev/null ||
    fail "no C++ compiler (${CXX:-c++}) found; DeepSpeed compiles an operator with it." \
      "Install one (on Debian and Ubuntu: the package g++)."
  local headers
  headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [ -f "$headers/Python.h" ] ||
    fail "no Python.h in $headers; DeepSpeed compiles an operator against it." \
      "Install Python's headers (on Debian and Ubuntu: the package python3-dev)."
}

install_project() {
  # Twice quiet: errors, no warnings (of running as root, of a newer pip). What it downloads is
  # counted with the environment.
  local pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check)
  pip+=(install --no-compile -c "$root/constraints.txt")
  mkdir -p "$venv/tmp"
  # Alone: most of the download, so that its line says what is going on.
  TMPDIR="$venv/tmp" during "$torch_s" '1 of 3, installing torch' "${pip[@]}" torch ||
    fail "installing torch failed, see above."
  TMPDIR="$venv/tmp" during "$packages_s" '2 of 3, installing ds_ckpt and what it needs' \
    "${pip[@]}" -e "$root[hf,mpi,report,dev]" || fail "installing ds_ckpt failed, see above."
  rm -rf "$venv/tmp"
}

# above BASE PLACE [OPTIONS OF venv]: makes an environment that sees the packages of BASE below its own.
above() {
  local packages='import sysconfig; print(sysconfig.get_path("purelib"))' below
  "$1/bin/python" -m venv "${@:3}" "$2" && below=$("$1/bin/python" -c "$packages") &&
    echo "import site; site.addsitedir('$below')" >"$("$2/bin/python" -c "$packages")/base.pth"
}

compile_all() {
  # Else the first launch compiles the operator, in silence.
  "$venv/bin/python" -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' \
    >"$venv/compile.log" 2>&1 &
  # pip would compile with one core, and all: half of what is left out here is never imported. Python
  # compiles at import what is. What does not compile is for a newer Python.
  local rarely='/(tests?|transformers/models|scipy|matplotlib|fontTools|mypyc?|pip|pygments/lexers|torch/testing)/'
  "$venv/bin/python" -m compileall -qq -j 0 -x "$rarely" "$venv/lib" || true
  wait $!
}

[ -x "$venv/bin/python" ] || make_venv
"$venv/bin/python" -c 'import pip' 2>/dev/null ||
  fail "$venv is incomplete: making it was stopped, or its Python is gone." "Remove it: rm -r $venv"
check_compiler
stamp="$venv/.ds_ckpt-installed"
# DeepSpeed looks for ninja on the PATH. The operator it compiles is kept with the environment:
# in torch's common folder, environments with other versions of ninja compile it again in turns.
export PATH="$venv/bin:$PATH"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$(digest)" ]; then
  install_project
  DS_ACCELERATOR=cpu during "$compile_s" "3 of 3, compiling Python files and DeepSpeed's operator" \
    compile_all || fail "compiling failed, see $venv/compile.log."
  digest >"$stamp"
  printf 'setup: ready\n'
fi
