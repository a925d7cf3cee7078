#!/usr/bin/env bash
# Builds the site of docs/ into build/site, and looks at its pages where there is a browser; any
# warning ends it. `./scripts/site.sh serve` shows it.
#
# It has an environment of its own, .venv-docs, with the packages of docs/_site/requirements.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-docs
if ! cmp -s docs/_site/requirements.txt "$venv/installed"; then
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip -qq --disable-pip-version-check install -r docs/_site/requirements.txt
  cp docs/_site/requirements.txt "$venv/installed"
fi
export NO_MKDOCS_2_WARNING=1
if [ "${1:-build}" = serve ]; then
  exec "$venv/bin/mkdocs" serve
fi
"$venv/bin/mkdocs" build --strict --quiet
if command -v chromium >/dev/null; then
  "$venv/bin/python" scripts/site_check.py build/site
else
  echo "build/site: $(find build/site -name '*.html' | wc -l) pages, not seen: there is no chromium"
fi
