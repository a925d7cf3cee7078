"""A fault: a patch that is found by its text, so that it survives moved lines, files and indents.

A `NAME.patch` beside this file:

    What is broken, in one line.
    law: 3                       one of docs/design.md, or a promise in words
    tests: tests/unit/test_feedback.py -k lost
    @@ ds_ckpt/compression/feedback.py
     a line that stays
    -a line that goes
    +a line that comes

`tests` are arguments of pytest, or `lint-imports`. The lines of a hunk that stay or go must stand
together in exactly one place: of the named file, or, where that has none or is gone, of the whole
package. Indents count only against each other. Several hunks may follow each other.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
PACKAGE = "ds_ckpt"


class DoesNotApplyError(Exception):
    """The text of a hunk stands nowhere, or in more than one place."""


@dataclass(frozen=True)
class Hunk:
    """Lines that follow each other in `file`, and those that take their place."""

    file: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """One patch file; `law` is a number of docs/design.md, or a promise in words."""

    name: str
    what: str
    law: str
    tests: tuple[str, ...]
    hunks: tuple[Hunk, ...]

    @classmethod
    def read(cls, path: Path) -> "Fault":
        """Raises ValueError where the file is none."""
        head, *parts = path.read_text(encoding="utf-8").split("@@ ")
        what, *keys = head.strip().splitlines()
        values = dict(key.split(": ", 1) for key in keys)
        if values.keys() != {"law", "tests"} or not parts:
            raise ValueError(f"{path.name}: a line of words, law:, tests: and hunks are needed")
        hunks = tuple(_hunk(path.name, part) for part in parts)
        return cls(path.stem, what, values["law"], tuple(shlex.split(values["tests"])), hunks)

    def apply(self, tree: Path) -> None:
        """Break the tree.

        Raises:
            DoesNotApplyError: with the hunk and what was found; nothing is changed then.
        """
        for path, lines in self.check(tree).items():
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def check(self, tree: Path) -> dict[Path, list[str]]:
        """The files that it changes, with the fault in them. Raises as `apply`."""
        contents: dict[Path, list[str]] = {}
        for hunk in self.hunks:
            path, at = _place(tree, hunk, contents)
            lines = contents.setdefault(path, _lines(path))
            shift = _indent(lines[at]) - _indent(hunk.before[0])
            lines[at : at + len(hunk.before)] = [_shifted(line, shift) or "" for line in hunk.after]
        return contents


def read_all(folder: Path = FOLDER) -> list[Fault]:
    return [Fault.read(path) for path in sorted(folder.glob("*.patch"))]


def _hunk(name: str, text: str) -> Hunk:
    file, *lines = text.rstrip("\n").split("\n")
    if any(line[:1] not in ("", " ", "-", "+") for line in lines):
        raise ValueError(f"{name}: a line of a hunk begins with none of ' ', '-' and '+'")
    before = tuple(line[1:] for line in lines if not line.startswith("+"))
    after = tuple(line[1:] for line in lines if not line.startswith("-"))
    if not before or before == after:
        raise ValueError(f"{name}: a hunk that finds or changes nothing")
    return Hunk(file.strip(), before, after)


def _place(tree: Path, hunk: Hunk, contents: dict[Path, list[str]]) -> tuple[Path, int]:
    named = tree / hunk.file
    everywhere = sorted((tree / PACKAGE).rglob("*.py"))
    found: list[tuple[Path, int]] = []
    for paths in ([named] if named.exists() else [], everywhere):
        if not found:
            found = [(p, at) for p in paths for at in _places(contents.get(p) or _lines(p), hunk)]
    if len(found) != 1:
        where = ", ".join(f"{p.relative_to(tree)}:{at + 1}" for p, at in found) or "nowhere"
        text = "\n".join(f"    {line}" for line in hunk.before)
        raise DoesNotApplyError(f"must stand in one place of {hunk.file}, stands {where}:\n{text}")
    return found[0]


def _places(lines: list[str], hunk: Hunk) -> Iterator[int]:
    first = hunk.before[0]
    for at in range(len(lines) - len(hunk.before) + 1):
        if lines[at].strip() == first.strip():
            shift = _indent(lines[at]) - _indent(first)
            found = lines[at : at + len(hunk.before)]
            if all(_shifted(a, shift) == b for a, b in zip(hunk.before, found, strict=True)):
                yield at


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _shifted(line: str, by: int) -> str | None:
    """None where the line would begin before the margin."""
    at = _indent(line) + by
    if not line.strip():
        return ""
    return " " * at + line.lstrip(" ") if at >= 0 else None
