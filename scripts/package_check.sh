#!/usr/bin/env bash
# Builds the sdist, the wheel from it, installs the wheel into an empty environment, and uses it there.
#
#   ./scripts/package_check.sh [--slow]
#
# pip downloads what it has not in its cache. The versions are those of constraints.txt. With --slow
# they are the newest, and DeepSpeed's operator is compiled: minutes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}
[[ " $* " == *" --slow "* ]] && slow=1 || slow=
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
pip() { "$python" -m pip --python "$folder/bare/bin/python" -qq --disable-pip-version-check "$@"; }

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

"$python" -m venv --without-pip bare
# no --no-deps and no packages from here: also DeepSpeed is built where there is no torch
echo "pip install $(basename "$wheel")[hf]"
constraints=(-c "$root/constraints.txt")
[ -z "$slow" ] || constraints=()
pip install --no-compile ${constraints[@]+"${constraints[@]}"} "$wheel[hf]"
pip check
pip install --no-compile "readme_renderer[md]" # what a package index shows a description with

echo "files, metadata and description of the wheel"
bare/bin/python - "$wheel" "$folder/tree" <<'CHECK'
import re, sys, tarfile, zipfile
from pathlib import Path

from packaging.metadata import Metadata
from readme_renderer import markdown

wheel, tree = zipfile.ZipFile(sys.argv[1]), Path(sys.argv[2])
names = {n for n in wheel.namelist() if n.startswith("ds_ckpt/")}
wanted = {str(p.relative_to(tree)) for p in (tree / "ds_ckpt").rglob("*") if p.is_file()}
assert names == wanted, f"lacking: {sorted(wanted - names)}, too many: {sorted(names - wanted)}"
(info,) = {n.partition("/")[0] for n in wheel.namelist() if ".dist-info/" in n}
sdist = tarfile.open(*Path("dist").glob("*.tar.gz"))
(member,) = (n for n in sdist.getnames() if re.fullmatch("[^/]+/PKG-INFO", n))
for text in (wheel.read(f"{info}/METADATA"), sdist.extractfile(member).read()):
    data = Metadata.from_email(text, validate=True)
    assert (str(data.license_expression), data.license_files) == ("MIT", ["LICENSE"]), data
    assert data.description_content_type == "text/markdown" and data.summary
    page = markdown.render(data.description)
    assert page and page.count("<table>") == data.description.count("\n|---"), "tables"
    for link in re.findall(r'(?:href|src)="([^"]*)"', page):
        assert re.match("https?://|#", link), f"{link} leads nowhere on a package index"
    assert not re.search(r"\]\((?!https?://|#)", data.description)
assert wheel.read(f"{info}/licenses/LICENSE") == (tree / "LICENSE").read_bytes()
CHECK

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
# README's start. DeepSpeed's operator takes a minute to compile: objects of the same versions are taken.
cat >cxx <<COMPILER
#!/bin/sh
for word; do
  object=\$(find "${TORCH_EXTENSIONS_DIR:-}" -name "\$word" -size +0 2>/dev/null | head -n 1)
  case \$word in *.o) [ -z "$slow" ] && [ -n "\$object" ] && [ "\$last" = -o ] && exec cp "\$object" "\$word" ;; esac
  last=\$word
done
exec ${CXX:-c++} "\$@"
COMPILER
chmod +x cxx
echo "deepspeed --num_gpus 2 examples/train.py"
CXX="$folder/cxx" PATH="$folder/bare/bin:$PATH" TORCH_EXTENSIONS_DIR="$folder/operators" OMP_NUM_THREADS=1 \
  deepspeed --num_gpus 2 --master_port 29617 tree/examples/train.py --steps 3 >said 2>log ||
  { cat said log; exit 1; }
grep -q "^step    3  loss" said
echo "ds_ckpt $version: sdist and wheel are whole"
