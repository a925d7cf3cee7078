#!/usr/bin/env bash
# What only a GPU can show, in eight minutes after the set-up: ./scripts/gpu_check.sh [--json FILE] [--only CHECK ...]
#
# From a bare machine with an NVIDIA driver, Python and a C++ compiler. PYTHON may name a Python that
# has torch for CUDA already: then what else is needed goes into an environment beside it that sees
# its packages; otherwise one is made as scripts/test.sh does. Options go to benchmarks/gpu_check.py;
# --device cpu rehearses what does not need a GPU. Without nvcc DeepSpeed is installed without its CUDA
# operators, which no check needs. The JSON file is written even if the set-up fails, with the cause.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
json=gpu_check.json
device=cuda
for ((i = 1; i <= $#; i++)); do
  next=$((i + 1))
  case ${!i} in
    --json) json=${!next} ;;
    --json=*) json=${!i#*=} ;;
    --device) device=${!next} ;;
    --device=*) device=${!i#*=} ;;
  esac
done
case $json in /*) ;; *) json=$PWD/$json ;; esac
begun=
failed() {
  local status=$?
  if [ "$status" != 0 ] && { [ -z "$begun" ] || [ ! -e "$json" ]; }; then
    printf '{"date": "%s", "device": "%s", "checks": {}, "error": "%s"}\n' \
      "$(date -u '+%Y-%m-%d %H:%M UTC')" "$device" "${cause:-the set-up failed, see its output}" >"$json"
    printf 'gpu_check: %s\nwritten to %s\n' "${cause:-the set-up failed, see above}" "$json" >&2
  fi
}
trap failed EXIT
cause=
refuse() {
  cause="$*"
  exit 2
}
driver_cuda= # the newest CUDA that the driver runs
if [ "$device" = cuda ]; then
  command -v nvidia-smi >/dev/null || refuse "nvidia-smi is missing: install an NVIDIA driver."
  driver_cuda=$({ nvidia-smi || true; } | sed -n 's/.*CUDA Version: *\([0-9][0-9.]*\).*/\1/p' | head -n 1)
  [ -n "$driver_cuda" ] || refuse "nvidia-smi shows no CUDA version: the driver does not run."
fi
command -v nvcc >/dev/null || export DS_IGNORE_CUDA_DETECTION=1
if "$python" -c 'import torch, sys; sys.exit(not torch.version.cuda)' 2>/dev/null; then
  venv="$root/.venv-gpu"
  if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
    # not --system-site-packages, which leads past a virtual environment to what it was made from
    packages=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
    echo "import site; site.addsitedir('$packages')" \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
  fi
  # torch stays the one that is there; the others need no newer one
  install=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)
  if ! "$venv/bin/python" -c 'import ds_ckpt.cli, deepspeed, transformers' 2>/dev/null; then
    "${install[@]}" 'setuptools>=77' wheel
    "${install[@]}" --no-build-isolation -e "$root[hf,report]" # DeepSpeed looks at the torch there
  fi
  export PATH="$venv/bin:$PATH"
else
  source "$root/scripts/_setup.sh"
fi
if [ "$device" = cuda ]; then
  torch_cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "")')
  [ -n "$torch_cuda" ] ||
    refuse "torch in $venv is built for CPUs. Name a Python with a torch for CUDA ${driver_cuda%%.*}: PYTHON=... $0"
  # within one major version of CUDA every driver runs every torch
  [ "${torch_cuda%%.*}" -le "${driver_cuda%%.*}" ] ||
    refuse "torch is built for CUDA $torch_cuda, the driver runs CUDA $driver_cuda or older." \
      "Update the driver, or name a Python with the newest torch for CUDA ${driver_cuda%%.*}" \
      "(its version ends in +cu${driver_cuda%%.*}, then one digit): PYTHON=... $0"
fi
cd "$root"
begun=1
rm -f "$json"
"$venv/bin/python" -m benchmarks.gpu_check "$@" --json "$json"
