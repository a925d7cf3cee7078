"""Break a copy of the tree, one fault at a time, and print which faults the tests catch.

    python -m tests.faults [--only NAME ...] [--whole] [--jobs N]

By default each fault meets the tests that its patch names; with `--whole` the whole fast suite.
The working tree is copied, never changed. The exit status is 0 where every fault was caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.faults.patches import PACKAGE, ROOT, DoesNotApplyError, Fault, read_all

LIMIT_S = 900.0
_SUITE = ("tests/unit", "tests/contract", "tests/distributed")
_COPIED = (PACKAGE, "tests", "pyproject.toml", "constraints.txt", "scripts", "ds_configs", "docs")
_COPIED += ("benchmarks", "README.md", "hostfiles", ".ci", "examples", "mkdocs.yml")
_COPIED += ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CITATION.cff")


@dataclass(frozen=True)
class Result:
    """Result of one fault; `by` is the first test that failed, or the reason of another verdict."""

    verdict: str
    by: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
    parser.add_argument("--whole", action="store_true", help="the whole fast suite for each")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree at work at once")
    options = parser.parse_args()
    faults = read_all()
    if options.only:
        unknown = set(options.only) - {f.name for f in faults}
        if unknown:
            parser.error(f"no such fault: {', '.join(sorted(unknown))}")
        faults = [f for f in faults if f.name in options.only]
    return _run(faults, options)


def _run(faults: list[Fault], options: argparse.Namespace) -> int:
    width = max((len(f.name) for f in faults), default=0)
    left = 0
    with tempfile.TemporaryDirectory(prefix="ds_ckpt_faults_") as folder:
        trees = _Trees(Path(folder))
        with ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda f: trees.meet(f, whole=options.whole), faults)
            for fault, result in zip(faults, results, strict=True):
                left += result.verdict != "caught"
                law = fault.law if len(fault.law) > 1 else f"law {fault.law}"
                print(
                    f"{fault.name:{width}}  {result.verdict:14}  {result.seconds:5.0f} s  {law}: "
                    f"{result.by}",
                    flush=True,
                )
    print(f"{len(faults) - left} of {len(faults)} caught")
    return 1 if left else 0


class _Trees:
    """A copy of the working tree for each thread, made anew from it for each fault."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def meet(self, fault: Fault, *, whole: bool) -> Result:
        tree = self._folder / str(threading.get_ident())
        shutil.rmtree(tree, ignore_errors=True)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(source, tree / name, ignore=ignored)
            elif source.exists():
                tree.mkdir(exist_ok=True)
                shutil.copy(source, tree / name)
        start = time.monotonic()
        try:
            fault.apply(tree)
        except DoesNotApplyError as error:
            return Result("does not apply", " ".join(str(error).split()), 0.0)
        verdict, by = _tested(tree, _SUITE if whole else fault.tests)
        return Result(verdict, by, time.monotonic() - start)


def _tested(tree: Path, tests: tuple[str, ...]) -> tuple[str, str]:
    """Return whether the tests fail in the tree, and the first that does."""
    linted = tests[0] == "lint-imports"
    command = [str(Path(sys.executable).parent / "lint-imports")] if linted else _PYTEST + [*tests]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    try:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        how = {"cwd": tree, "env": environment, "stdin": subprocess.DEVNULL, **streams}
        run = subprocess.run(command, **how, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "caught", f"no end after {LIMIT_S:g} s"
    if run.returncode == 0:
        return "NOT CAUGHT", "passes: " + " ".join(tests)
    if linted:
        return "caught", "lint-imports"
    if run.returncode != 1:
        last = run.stdout.strip().splitlines()[-3:]
        return "CANNOT BE RUN", " / ".join(last)
    first = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return "caught", first[1] if first else "a test"


_PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--tb=no", "-p", "no:cacheprovider"]
_PYTEST += ["--hypothesis-profile", "thorough"]


if __name__ == "__main__":
    sys.exit(main())
