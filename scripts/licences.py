"""docs/licences.md: the licence of every package that ds_ckpt needs, from installed metadata.

python scripts/licences.py           # writes it
python scripts/licences.py --check   # exit 1 where it is not what the environment says
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences

ds_ckpt: MIT ([LICENSE](https://opensource.org/license/mit)). The packages that it needs, from
their own metadata, by `python scripts/licences.py`. None of them is part of the wheel.

"""


def licence(name: str) -> str:
    """Return the licence in the package's metadata: SPDX expression, classifiers or short text."""
    data = distribution(name).metadata
    expression = data.get("License-Expression")
    if expression:
        return str(expression)
    found = [c.rpartition(" :: ")[2] for c in data.get_all("Classifier") or () if "License" in c]
    text = str(data.get("License") or "").strip().splitlines()
    return ", ".join(found) or (text[0][:60] if text else "not said")


def requirements() -> dict[str, list[str]]:
    """Names by the extra that needs them; "" is always. What pyproject.toml says."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(text).name for text in texts] for extra, texts in found.items()}


def page() -> str:
    rows = ["| package | needed | licence |", "|---|---|---|"]
    for extra, names in requirements().items():
        for name in names:
            if name == "ds_ckpt":
                continue
            try:
                rows.append(f"| {name} | {extra or 'always'} | {licence(name)} |")
            except PackageNotFoundError:
                raise SystemExit(f"{name} is not installed: install ds_ckpt[{extra}]") from None
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif page() != PAGE.read_text(encoding="utf-8"):
        print("docs/licences.md is old: python scripts/licences.py", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
