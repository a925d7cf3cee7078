#!/usr/bin/env bash
# What only a GPU can show, in ten minutes: ./scripts/gpu_check.sh [--json FILE] [--only CHECK ...]
#
# From a bare machine with an NVIDIA driver, Python and a C++ compiler. PYTHON may name a Python that
# has torch for CUDA already: then what else is needed goes into an environment beside it that sees
# its packages; otherwise one is made as scripts/test.sh does. Options go to benchmarks/gpu_check.py;
# --device cpu rehearses what does not need a GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
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
cd "$root"
exec "$venv/bin/python" -m benchmarks.gpu_check "$@"
