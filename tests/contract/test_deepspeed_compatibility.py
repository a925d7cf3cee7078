"""The installed DeepSpeed has what the hooks lean on, and a moved one is told from it."""

from __future__ import annotations

import pytest

from ds_ckpt.errors import ContractError
from ds_ckpt.zero3 import compatibility

FIRST = compatibility.SYMBOLS[0]


def test_every_symbol_is_as_tested() -> None:
    findings = compatibility.check()
    assert len(findings) == len(compatibility.SYMBOLS) > 10
    assert {f.status for f in findings} == {"ok"}


def test_a_missing_symbol_is_refused_with_the_tested_versions() -> None:
    moved = compatibility.Symbol(FIRST.path + "_gone", FIRST.signature, FIRST.digest, "reduce")
    elsewhere = compatibility.Symbol("deepspeed.runtime.gone:thing", "", "", "reduce")
    with pytest.raises(ContractError) as error:
        compatibility.require([moved, elsewhere, FIRST])
    assert len(error.value.problems) == 2
    assert "reduce_scatter_coalesced_gone" in str(error.value)
    assert compatibility.TESTED_VERSIONS[-1] in str(error.value)


def test_another_signature_is_refused() -> None:
    moved = compatibility.Symbol(FIRST.path, FIRST.signature + ", more", FIRST.digest, "reduce")
    with pytest.raises(ContractError, match="takes"):
        compatibility.require([moved])


def test_another_digest_alone_only_warns() -> None:
    moved = compatibility.Symbol(FIRST.path, FIRST.signature, "0" * 16, "reduce")
    assert [f.status for f in compatibility.require([moved])] == ["digest_changed"]


def test_digest_ignores_comments_and_space_only() -> None:
    def one(a: int) -> int:
        # a word
        return a + 1

    def two(a: int) -> int:

        return a + 1

    source = compatibility.describe
    assert source(one)[0] == source(two)[0] == "a"
    assert source(one)[1] != source(two)[1]  # the name differs
    two_named_one = source(two)[1]
    assert two_named_one == source(two)[1]


def test_a_decorated_function_is_held_by_its_own_source() -> None:
    """DeepSpeed's decorator leaves no trace of what it wraps; all would share one digest."""
    from deepspeed.utils import instrument_w_nvtx

    def one(a: int) -> int:
        return a + 1

    def two(a: int, b: int) -> int:
        return a + b

    assert compatibility.describe(instrument_w_nvtx(one)) == compatibility.describe(one)
    assert compatibility.describe(instrument_w_nvtx(two)) == compatibility.describe(two)
    digests = [s.digest for s in compatibility.SYMBOLS if s.digest]
    assert len(set(digests)) == len(digests)
    assert all("*args" not in s.signature for s in compatibility.SYMBOLS)
