#!/usr/bin/env bash
# Builds the sdist, the wheel from it, installs the wheel into a bare environment, and uses it there.
#
#   ./scripts/package_check.sh [--whole]
#
# Dependencies come from the environment that runs this (its site-packages, through a .pth file,
# which brings no editable install along), so that it takes seconds. With --whole pip installs the
# wheel with all it needs, as a user does: minutes, and a large download.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH

# from a copy of what is tracked: building leaves nothing in the tree
mkdir "$folder/tree" "$folder/dist"
git -C "$root" ls-files -z --cached --others --exclude-standard |
  (cd "$root" && xargs -0 cp --parents -t "$folder/tree")
cd "$folder/tree"
"$python" -W ignore -c 'import setuptools.build_meta as b; b.build_sdist("../dist")' >"$folder/log" 2>&1 ||
  { cat "$folder/log"; exit 1; }
cd "$folder"
"$python" -m pip -qq --disable-pip-version-check wheel --no-deps --no-build-isolation \
  -w dist dist/*.tar.gz
wheel=$(ls dist/*.whl)

echo "files of the wheel against those that are tracked"
"$python" - "$wheel" "$folder/tree" <<'CHECK'
import sys, zipfile
from pathlib import Path
names = {n for n in zipfile.ZipFile(sys.argv[1]).namelist() if n.startswith("ds_ckpt/")}
tree = Path(sys.argv[2])
wanted = {str(p.relative_to(tree)) for p in (tree / "ds_ckpt").rglob("*") if p.is_file()}
if names != wanted:
    raise SystemExit(f"lacking: {sorted(wanted - names)}, too many: {sorted(names - wanted)}")
CHECK

"$python" -m venv bare
if [ "${1:-}" = --whole ]; then
  bare/bin/python -m pip -qq --disable-pip-version-check install "$wheel[hf,report]"
else
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$site" >"$(bare/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
  bare/bin/python -m pip -qq --disable-pip-version-check install --no-deps "$wheel"
fi

version=$("$python" -c "import ast; print(next(n.value.value for n in ast.parse(open('$root/ds_ckpt/__init__.py').read()).body if isinstance(n, ast.Assign) and n.targets[0].id == '__version__'))")
for command in \
  "--version" \
  "validate tree/ds_configs/zero3_3bit.json" \
  "schema -o schema.json" \
  "profile demo --tokens 16 --policies block"; do
  echo "ds-ckpt $command"
  # shellcheck disable=SC2086
  bare/bin/ds-ckpt $command >said 2>log || { cat said log; exit 1; }
  [ "$command" != "--version" ] || grep -qx "ds-ckpt $version" said
done
grep -q properties schema.json
bare/bin/python -c 'import ds_ckpt, sys; assert "bare" in ds_ckpt.__file__, ds_ckpt.__file__'
echo "ds_ckpt $version: sdist and wheel are whole"
