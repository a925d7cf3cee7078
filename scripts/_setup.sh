# Sourced by test.sh and demo.sh: makes or reuses .venv and installs the project into it.
#
# PYTHON names the Python to make .venv with (default: python3). pip's own settings and
# environment variables apply as ever. Installs only when pyproject.toml or constraints.txt have
# changed since the last time.
set -euo pipefail

# Hundreds of processes would compile the same Python files.
unset PYTHONDONTWRITEBYTECODE

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
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
  printf 'setup: making %s\n' "$venv"
  "$python" -m venv --clear "$venv" || fail "python -m venv failed, see above."
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
  # On a terminal pip shows every download with the time left. Else twice quiet: errors, no warnings
  # (of running as root, of a newer pip).
  local quiet=(-qq) constraints=(-c "$root/constraints.txt")
  [ ! -t 1 ] || quiet=()
  local pip=("$venv/bin/python" -m pip ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check)
  pip+=(install --no-compile)
  printf 'setup 1 of 3: installing torch, a download of 200 MB or more ...\n'
  # Alone: most of the download, so that its line says what is going on.
  "${pip[@]}" "${constraints[@]}" torch || fail "installing torch failed, see above."
  printf 'setup 2 of 3: installing ds_ckpt and what it needs, about 100 MB ...\n'
  "${pip[@]}" "${constraints[@]}" -e "$root[hf,mpi,report,dev]" ||
    fail "installing ds_ckpt failed, see above."
}

compile_operator() {
  # Else the first launch does, in silence. It takes about a minute, on two cores.
  set -m # a process group of its own, so that the compiler can be ended, too
  "$venv/bin/python" -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' \
    >"$venv/compile.log" 2>&1 &
  set +m
  local compiling=$! begun=$SECONDS left
  trap 'kill -- "-$compiling" 2>/dev/null; exit 130' INT TERM
  printf 'setup 3 of 3: compiling Python files, and an operator of DeepSpeed, about 60 s left\n'
  # pip would compile with one core, and all: half of what is left out here is never imported. Python
  # compiles at import what is. What does not compile is for a newer Python.
  local rarely='/(tests?|transformers/models|scipy|matplotlib|fontTools|mypyc?|pip|pygments/lexers|torch/testing)/'
  "$venv/bin/python" -m compileall -qq -j 0 -x "$rarely" "$venv/lib" || true
  while kill -0 "$compiling" 2>/dev/null; do
    left=$((60 - SECONDS + begun))
    printf 'setup 3 of 3: compiling an operator of DeepSpeed, about %s s left\n' "$((left > 5 ? left : 5))"
    for _ in 1 2 3 4 5 6 7 8 9 10; do ! kill -0 "$compiling" 2>/dev/null || sleep 1; done
  done
  trap - INT TERM
  wait "$compiling" || fail "compiling failed, see $venv/compile.log."
}

[ -x "$venv/bin/python" ] || make_venv
"$venv/bin/python" -c 'import pip' 2>/dev/null ||
  fail "$venv is not whole: making it was stopped, or its Python is gone." "Remove it: rm -r $venv"
check_compiler
stamp="$venv/.ds_ckpt-installed"
# DeepSpeed looks for ninja on the PATH. The operator it compiles is kept with the environment:
# in torch's common folder, environments with other versions of ninja compile it again in turns.
export PATH="$venv/bin:$PATH"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$(digest)" ]; then
  install_project
  DS_ACCELERATOR=cpu compile_operator
  digest >"$stamp"
  printf 'setup: ready\n'
fi
