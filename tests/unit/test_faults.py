"""Deliberate faults (tests/faults): each applies to this tree, and every law has two of them."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.patches import PACKAGE, ROOT, DoesNotApplyError, Fault, read_all

FAULTS = read_all()
BLOCK = """def first():
    scale = 1
    return scale


def second():
    if True:
        scale = 2
        return scale
"""


def _fault(tmp_path: Path, *hunk: str) -> Fault:
    path = tmp_path / "wrong_scale.patch"
    path.write_text("\n".join(("It is wrong.", "law: 3", "tests: tests/unit", *hunk, "")))
    return Fault.read(path)


def _tree(tmp_path: Path, file: str = "there.py") -> Path:
    tree = tmp_path / "tree"
    (tree / PACKAGE).mkdir(parents=True, exist_ok=True)
    (tree / PACKAGE / file).write_text(BLOCK)
    return tree


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_applies_and_names_tests_that_exist(fault: Fault) -> None:
    fault.check(ROOT)
    if fault.tests[0] == "lint-imports":
        return
    paths = [word for word in fault.tests if word.startswith("tests/")]
    assert paths
    text = "".join((ROOT / path).read_text() for path in paths)
    if "-k" in fault.tests:
        words = re.findall(r"\w+", fault.tests[fault.tests.index("-k") + 1])
        wanted = [word for word in words if word not in ("and", "or", "not")]
        assert any(word in text for word in wanted)


def test_every_law_has_two_faults() -> None:
    laws = Counter(fault.law for fault in FAULTS)
    assert all(laws[str(law)] >= 2 for law in range(1, 10))
    assert len(FAULTS) >= 30
    assert sum("tests/distributed" in " ".join(fault.tests) for fault in FAULTS) >= 8


def test_text_is_found_in_another_file_and_indent(tmp_path: Path) -> None:
    fault = _fault(tmp_path, "@@ ds_ckpt/gone.py", " if True:", "-    scale = 2", "+    scale = 3")
    tree = _tree(tmp_path)
    fault.apply(tree)
    assert "        scale = 3\n        return" in (tree / PACKAGE / "there.py").read_text()


def test_text_that_stands_twice_or_nowhere_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    twice = ("@@ ds_ckpt/there.py", "-return scale")
    nowhere = ("@@ ds_ckpt/there.py", "-    scale = 2", "-return scale")
    good = ("@@ ds_ckpt/there.py", "-    scale = 1")
    for hunk, words in ((twice, "there.py:2, ds_ckpt/there.py:8"), (nowhere, "stands nowhere")):
        with pytest.raises(DoesNotApplyError, match=words):
            _fault(tmp_path, *good, *hunk).apply(tree)
    assert (tree / PACKAGE / "there.py").read_text() == BLOCK


@pytest.mark.parametrize(
    "hunk",
    [(), ("@@ ds_ckpt/there.py", "scale = 1"), ("@@ ds_ckpt/there.py", " return scale")],
    ids=["none", "no sign", "no change"],
)
def test_a_file_that_is_no_fault_is_refused(tmp_path: Path, hunk: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"wrong_scale\.patch"):
        _fault(tmp_path, *hunk)
