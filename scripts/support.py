"""Read and write the support table for scripts/matrix.sh.

versions: what this Python has, in one line. contract: the plugin's answer to the installed
DeepSpeed, with status 1 where it refuses. write FOLDER: docs/support.md from the results there and,
for rows that have none there, from those of other machines that docs/support.json keeps.
"""

from __future__ import annotations

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stdout
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ds_ckpt.errors import ContractError, UnsupportedError
from ds_ckpt.zero3 import compatibility

PACKAGES = ("deepspeed", "torch", "transformers")
PARTS = {
    "contract": ("contract",),
    "checkpointing": ("test_gather", "test_recompute", "test_policies"),
    "compression": ("test_compression", "test_exchange", "test_feedback"),
    "resident weights": ("test_weights",),
    "session": ("test_session",),
}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"
RECORD = PAGE.with_suffix(".json")
INTRODUCTION = """# Versions

Written by `scripts/matrix.sh`: the contract (`tests/contract`) and the tests of the laws
([design.md](design.md)) with each set of versions, on Linux with gloo. Numbers count passed tests.
Test sets: "laws" = all tests of the laws, "short" = the tests that break first, "none" = the plugin
refuses this version. "not run": not in the set.

"""
TRIED = ", ".join(
    f"{name} {first} to {last}" for name, (first, last) in compatibility.TRIED.items()
)
FIRST, LAST, RESIDENT = compatibility.FIRST, compatibility.LAST, compatibility.RESIDENT_SINCE
END = f"""
Every DeepSpeed release from {FIRST} to {LAST} has sources that
`ds_ckpt/zero3/compatibility.py` lists by digest, for the symbols that the hooks use. That file also
has the differences between versions. With another source the plugin logs a warning when it is
attached, and compares the first bucket with DeepSpeed's own reduction. If a symbol is missing, the
plugin refuses.

Tested versions are
{TRIED}:
the ends of each range, and between them those in the table. `ds-ckpt doctor` warns of a version
outside.

`weights.resident` needs DeepSpeed {RESIDENT}. Earlier versions are refused, because hpZ leaves
padding uninitialised there.

DeepSpeed's own tests of gradient clipping, leaf modules, activation checkpointing and checkpoints
have the same results without the plugin and with `dense` in every engine of stage 3
([results](../benchmarks/results/deepspeeds_tests.txt)).
"""


def versions() -> str:
    return " ".join([*(version(name) for name in PACKAGES), platform.python_version()])


def contract() -> int:
    try:
        with redirect_stdout(sys.stderr):  # where DeepSpeed logs
            compatibility.require_torch()
            compatibility.require()
    except UnsupportedError as error:
        (problem,) = error.problems
        print(f"{problem.where} {problem.found} is refused: {problem.why}; {problem.remedy}.")
        return 1
    except ContractError as error:
        found = [
            f"`{problem.where.rpartition('.')[2]}` is {problem.found.partition(' (')[0]}"
            for problem in error.problems
        ]
        remedy = error.problems[0].remedy
        print(f"DeepSpeed {version('deepspeed')} is refused: {'; '.join(found)}; {remedy}.")
        return 1
    return 0


def cells(result: Path) -> tuple[list[str], str]:
    """A cell for each part, and the day."""
    counts = {part: [0, 0, 0] for part in PARTS}  # passed, failed, skipped
    suite = next(ElementTree.parse(result).iter("testsuite"))
    for case in suite.iter("testcase"):
        place = case.get("classname", "")
        part = next(p for p, words in PARTS.items() if any(w in place.split(".") for w in words))
        ends = {child.tag for child in case}
        counts[part][1 if ends & {"failure", "error"} else 2 if "skipped" in ends else 0] += 1
    words = []
    for passed, failed, skipped in counts.values():
        if not passed and not failed:  # the tests of a part are skipped where it is refused
            words.append("refused" if skipped else "not run")
            continue
        word = f"{failed} of {passed + failed} failed" if failed else f"green, {passed}"
        words.append(word + (f" ({skipped} skipped)" if skipped else ""))
    return words, suite.get("timestamp", "")[:10]


def write(folder: Path) -> None:
    rows = json.loads(RECORD.read_text())
    for result in folder.glob("*.versions"):
        refused = result.with_suffix(".refused")
        ran = result.with_suffix(".xml")
        if result.stem == "ci" or not (ran.exists() or refused.read_text()):
            continue
        words, day = [""] * len(PARTS), datetime.fromtimestamp(result.stat().st_mtime).date()
        if ran.exists():
            words, day = cells(ran)
        rows[result.stem] = {
            "date": str(day),
            "versions": result.read_text().split(),
            "set": result.with_suffix(".set").read_text().strip(),
            "parts": words,
            "refused": refused.read_text(),
        }
    RECORD.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    ordered = sorted(rows.values(), key=_newest_first, reverse=True)
    columns = ["DeepSpeed", "torch", "transformers", "Python", "set", "date", *PARTS]
    table = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in ordered:
        words = ["refused", *row["parts"][1:]] if row["refused"] else row["parts"]
        table.append("| " + " | ".join([*row["versions"], row["set"], row["date"], *words]) + " |")
    refusals = dict.fromkeys(row["refused"] for row in ordered if row["refused"])
    text = "\n".join([*table, *("\n" + refusal.rstrip() for refusal in refusals)])
    PAGE.write_text(INTRODUCTION + text + "\n" + END)


def _newest_first(row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    deepspeed, torch, _, python = map(_numbers, row["versions"])
    return deepspeed, python, torch


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split("+")[0].split(".")]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["versions"]:
            print(versions())
        case ["contract"]:
            sys.exit(contract())
        case ["write", folder]:
            write(Path(folder))
        case _:
            sys.exit(__doc__)
