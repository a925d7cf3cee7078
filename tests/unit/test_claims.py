"""The ledger of claims: its form, that its commands exist, that its page is what it renders to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.command_lines import UsageError, check_command

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import claims as ledger  # noqa: E402

THEMES, CASES, CLAIMS = ledger.load()
BY_ID = {claim.id: claim for claim in CLAIMS}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_ids_are_unique_and_name_their_source() -> None:
    assert len(BY_ID) == len(CLAIMS) == 108
    for claim in CLAIMS:
        assert claim.source.startswith(claim.id.partition("-")[0] + "_")
        assert claim.theme in THEMES
        assert claim.by in ledger.DECIDED_BY


@pytest.mark.parametrize("command", sorted({c.command for c in CLAIMS}))
def test_a_reader_can_type_the_command(command: str) -> None:
    check_command(command)
    _, _, names = command.partition("claims.py --measure")
    assert set(names.split()) <= {case.name for case in CASES}
    _, _, row = command.partition("claims.py --row")
    assert set(row.split()) <= set(BY_ID)


@pytest.mark.parametrize(
    "command",
    [
        "ds-ckpt profil llama-7b",
        "ds-ckpt profile llama-7b --fakes",
        "python benchmarks/gone.py",
        "python benchmarks/claims.py --rows 1",
        "pytest tests/unit/test_guards.py -k no_such_test",
    ],
)
def test_a_command_that_is_none_is_found(command: str) -> None:
    with pytest.raises((AssertionError, KeyError, UsageError)):
        check_command(command)


def test_each_claim_is_decided_one_way() -> None:
    """By its figures or by a verdict that no figure decides; a condition is one of `found`."""
    for claim in CLAIMS:
        assert bool(claim.holds) != bool(claim.verdict), claim.id
        assert not claim.under or claim.holds, claim.id
        assert claim.verdict in ("", *ledger.VERDICTS), claim.id
        if claim.by in ("fake", "arithmetic", "result", "source") and claim.holds:
            assert claim.figures or "." in claim.holds, claim.id


def test_what_is_named_is_on_record() -> None:
    record = ledger.read_record()
    assert set(record["measurements"]) == {case.name for case in CASES}
    for case in CASES:
        assert set(record["measurements"][case.name]["steps"]) == {"none", *case.policies}, (
            case.name
        )


def test_the_page_is_what_the_data_renders_to() -> None:
    judged = ledger.judge(CASES, CLAIMS)
    assert ledger.page(THEMES, CASES, judged) == ledger.PAGE.read_text(encoding="utf-8"), (
        "write it again: python benchmarks/claims.py"
    )
    assert {row.verdict for row in judged} <= set(ledger.VERDICTS)


def test_a_figure_that_changes_changes_the_verdict() -> None:
    claim = BY_ID["004-26"]

    class Step:
        saved_bytes, peak_bytes, step_flops = 10, 20, 100

    cheap, dear = Step(), Step()
    cheap.peak_bytes, cheap.step_flops = 2, 126  # type: ignore[misc]
    dear.peak_bytes, dear.step_flops = 10, 126  # type: ignore[misc]
    assert claim.judged({"l7_4k": {"none": Step(), "block": cheap}}).verdict == "holds"
    assert claim.judged({"l7_4k": {"none": Step(), "block": dear}}).verdict == "does not hold"


def test_an_expression_that_cannot_be_worked_out_is_named() -> None:
    with pytest.raises(ValueError, match=r"claim 004-26: .*l7_4k"):
        BY_ID["004-26"].judged({})
