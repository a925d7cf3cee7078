"""The installed DeepSpeed has the symbols that the hooks use; a changed one is detected."""

import re
from dataclasses import replace
from pathlib import Path

import deepspeed
import pytest

from ds_ckpt.errors import ContractError, UnsupportedError
from ds_ckpt.zero3 import compatibility

FIRST = compatibility.SYMBOLS[0]


def test_every_symbol_is_as_tested() -> None:
    findings = compatibility.check()
    assert {f.symbol: f.detail for f in findings if f.status != "ok"} == {}
    assert 20 < len(findings) <= len(compatibility.SYMBOLS)


def test_a_missing_symbol_is_refused_with_the_tested_versions() -> None:
    moved = replace(FIRST, path=FIRST.path + "_gone")
    elsewhere = compatibility.Symbol("deepspeed.runtime.gone:thing", "", (), "reduce")
    with pytest.raises(ContractError) as error:
        compatibility.require([moved, elsewhere, FIRST])
    assert len(error.value.problems) == 2
    assert "reduce_scatter_coalesced_gone" in str(error.value)
    assert f"deepspeed>={compatibility.FIRST},<={compatibility.LAST}" in str(error.value)


def test_another_signature_is_refused_and_another_digest_alone_only_warns() -> None:
    with pytest.raises(ContractError, match="takes"):
        compatibility.require([replace(FIRST, signature=FIRST.signature + ", more")])
    moved = replace(FIRST, digests=("0" * 16,))
    assert [f.status for f in compatibility.require([moved])] == ["digest_changed"]


def test_a_symbol_is_asked_for_where_it_is_expected() -> None:
    installed = deepspeed.__version__
    newer = replace(FIRST, path=FIRST.path + "_new", since="99.1")
    older = replace(FIRST, path=FIRST.path + "_old", until="0.1.9")
    assert compatibility.check([newer, older]) == []
    here = replace(FIRST, since=installed, until=installed)
    assert [f.status for f in compatibility.check([here])] == ["ok"]
    assert newer.expected_in("99.1.0")
    assert newer.expected_in("99.1+local")
    assert older.expected_in("0.1.9+local")
    assert not older.expected_in("0.1.10")


def test_a_part_is_refused_with_the_versions_that_have_it() -> None:
    compatibility.require_resident_weights("0.19.5")
    compatibility.require_resident_weights("0.19.10+local")
    with pytest.raises(UnsupportedError) as error:
        compatibility.require_resident_weights("0.19.4")
    assert "$.ds_ckpt.weights.resident: found true with DeepSpeed 0.19.4" in str(error.value)
    assert f"deepspeed>={compatibility.RESIDENT_SINCE}," in str(error.value)


def test_a_torch_that_is_too_old_is_refused_with_those_that_are_not() -> None:
    first, last = compatibility.TRIED["torch"]
    compatibility.require_torch()
    compatibility.require_torch(f"{first}.0+cpu")
    with pytest.raises(
        UnsupportedError, match=f"(?s)found 2.8.0.*tried up to {last}.*torch>={first}"
    ):
        compatibility.require_torch("2.8.0")


@pytest.mark.parametrize(
    ("package", "version", "inside"),
    [
        ("torch", "2.9.0+cu128", True),
        ("torch", "2.8.1", False),
        ("torch", "3.0", False),
        ("deepspeed", "0.19.8", True),
        ("deepspeed", "0.19.9", False),
        ("transformers", "4.57.6", True),
        ("transformers", "4.56.2", False),
        ("python", "3.13.11", True),
        ("python", "3.14.0", False),
        ("mpi4py", "0.1", True),
    ],
)
def test_untested_versions_are_reported(package: str, version: str, inside: bool) -> None:
    assert (compatibility.outside(package, version) == "") is inside


def test_installers_require_the_tested_versions() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    for package, (first, last) in compatibility.TRIED.items():
        name = "requires-python = " if package == "python" else f'"{package}'
        asked = re.search(rf'{re.escape(name)}"?>=([\d.]+)(?:,<([\d.]+))?"', project)
        assert asked is not None, package
        assert asked[1] == first
        end, last_tried = asked[2], compatibility._release(last)
        assert end is None or compatibility._release(end) > last_tried, package


def test_digest_ignores_comments_and_space_only() -> None:
    def one(a: int) -> int:
        # a word
        return a + 1

    first = compatibility.identify(one)

    def one(a: int) -> int:

        return a + 1

    assert compatibility.identify(one) == first

    def one(a: int) -> int:
        return a + 2

    assert compatibility.identify(one)[0] == first[0] == "a"
    assert compatibility.identify(one)[1] != first[1]


def test_a_decorated_function_is_held_by_its_own_source() -> None:
    """DeepSpeed's decorator leaves no trace of what it wraps; all would share one digest."""
    from deepspeed.utils import instrument_w_nvtx

    def one(a: int) -> int:
        return a + 1

    def two(a: int, b: int) -> int:
        return a + b

    assert compatibility.identify(instrument_w_nvtx(one)) == compatibility.identify(one)
    assert compatibility.identify(instrument_w_nvtx(two)) == compatibility.identify(two)
    digests = [digest for s in compatibility.SYMBOLS for digest in s.digests]
    assert len(set(digests)) == len(digests)
    assert all("*args" not in s.signature for s in compatibility.SYMBOLS)
