"""DeepSpeed's own tests, as they are and with `dense` in every engine of stage 3.

    git clone --branch v0.19.8 https://github.com/deepspeedai/DeepSpeed
    python -m benchmarks.deepspeeds_tests DeepSpeed/tests [--only FILE ...] [--of WORDS]

Each file runs twice here, and each test must end in the same way: passed, skipped, failed, or
failed as its mark expects. Engines that have the plugin are counted, and the tests that make them.
What differs runs once more, both ways, alone. A test that does not end is stopped. The exit status
is 0 where nothing differs but by a refusal in words.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.injected import INJECT, RESULTS

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120
"""For one test."""
FILES = {
    "runtime/zero/test_zero_grad_clip.py": "",
    "v1/half_precision/test_gradient_clipping_default.py": "",
    "runtime/zero/test_zero_leaf_module.py": "",
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py": "",
    "checkpoint/test_zero_optimizer.py": "not Elastic",
    "checkpoint/test_lr_scheduler.py": "",
    "checkpoint/test_universal_checkpoint.py": "1-True-True-3-dtype2",
    "v1/zero/test_zero_hook_count_regression.py": "",
}
"""Gradient clipping, leaf modules, activation checkpointing, checkpoints, counts of hooks. Which
tests of a file, in pytest's words; of several stages it is the third."""

Results = dict[str, dict[str, Any]]


def run(tests: Path, what: list[str], folder: Path, *, injected: bool) -> Results:
    """Run the tests of DeepSpeed that `what` names; return the result of each."""
    results, attached = folder / "results.jsonl", folder / "attached"
    for path in (results, attached):
        path.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "8",  # so many devices has DeepSpeed's CPU
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{tests}{os.pathsep}{ROOT}",
        RESULTS: str(results),
    }
    if injected:
        environment[INJECT] = str(attached)
    found: Results = {}
    while True:
        left = [part for test in found for part in ("--deselect", test)]
        command = [sys.executable, "-m", "pytest", "-p", "tests.injected", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-q", "--tb=short", "-o", f"timeout={LIMIT_S}"]
        command += ["-o", "timeout_method=thread", *left, *what]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=tests, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what a stopped test leaves
        before = len(found)
        for line in results.read_text().splitlines() if results.exists() else []:
            result = json.loads(line)
            found[result["test"]] = result
        stopped = found and list(found.values())[-1]["outcome"] == "never ended"
        if not stopped or len(found) == before:
            return found


def pair(tests: Path, what: list[str], folder: Path) -> tuple[Results, Results]:
    """The same tests without and with the plugin."""
    return tuple(run(tests, what, folder, injected=injected) for injected in (False, True))  # type: ignore[return-value]


def differing(without: Results, with_it: Results) -> list[str]:
    """Tests that end in another way, in the order in which they run."""
    ends = {test: result["outcome"] for test, result in without.items()}
    ended = {test: result["outcome"] for test, result in with_it.items()}
    return [test for test in {**ends, **ended} if ends.get(test) != ended.get(test)]


def counts(results: Results) -> str:
    """Such as `3 passed, 1 skipped`."""
    ends = Counter(result["outcome"] for result in results.values())
    return ", ".join(f"{count} {outcome}" for outcome, count in ends.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="the folder `tests` of DeepSpeed's repository")
    parser.add_argument("--only", nargs="+", default=list(FILES), help="files below tests/unit")
    parser.add_argument("--of", default="the same version", help="which DeepSpeed's tests are")
    options = parser.parse_args()
    print(f"python -m benchmarks.deepspeeds_tests, {time.strftime('%Y-%m-%d')}: DeepSpeed", end=" ")
    print(f"{deepspeed.__version__}, torch {torch.__version__}, gloo; its tests of {options.of}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its tests end with it
    refused = broken = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tests = shutil.copytree(options.tests, folder / "tests")
        for file in options.only:
            start = time.monotonic()
            some = ["-k", FILES[file]] if FILES.get(file) else []
            without, with_it = pair(tests, [f"unit/{file}", *some], folder)
            ours = {test: result for test, result in with_it.items() if result.get("engines")}
            engines = sum(result["engines"] for result in ours.values())
            again = []
            for test in differing(without, with_it):
                once, twice = pair(tests, [test], folder)
                again += [(test, once, twice)] if differing(once, twice) else []
            print(f"\n{file}, {time.monotonic() - start:.0f} s")
            broken += not (without and with_it)  # nothing has run
            print(f"    without: {counts(without) or 'no test'}")
            print(f"    with: {counts(with_it) or 'no test'}")
            print(f"    {engines} engines of {len(ours)} tests have the plugin", end="")
            print(f": {counts(ours)}" if ours else "")
            for test, result in without.items():
                if result["outcome"] == "failed" == with_it.get(test, {}).get("outcome"):
                    print(f"    fails both ways: {test}")
                    print(f"        {' '.join(result['said'].split())[:300]}")
            for test, once, twice in again:
                print(f"    differs: {test}")
                for words, results in (("without", once), ("with", twice)):
                    result = results.get(test, {"outcome": "not run"})
                    said = result.get("said", "")
                    print(f"        {words}: {result['outcome']} {' '.join(said.split())[:600]}")
                words = " ".join(result.get("said", "") for result in twice.values())
                named = "UnsupportedError" in words or "ConfigError" in words
                refused, broken = refused + named, broken + (not named)
            sys.stdout.flush()
    print(f"\n{refused} refused in words, {broken} otherwise different")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
