"""The ledger of claims: its form, that its commands exist, that its page is what it renders to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.command_lines import check_command

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import claims as ledger  # noqa: E402

THEMES, CASES, CLAIMS = ledger.load()
BY_ID = {claim.id: claim for claim in CLAIMS}


@pytest.mark.parametrize("command", sorted({c.command for c in CLAIMS}))
def test_a_reader_can_type_the_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_command(command)
    _, _, names = command.partition("claims.py --measure")
    assert set(names.split()) <= {case.name for case in CASES}
    _, _, row = command.partition("claims.py --row")
    assert set(row.split()) <= set(BY_ID)


def test_each_claim_is_decided_one_way() -> None:
    """By its figures or by a verdict that no figure decides; a condition is one of `found`."""
    assert len(BY_ID) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.source.startswith(claim.id.partition("-")[0] + "_")
        assert claim.theme in THEMES
        assert claim.by in ledger.DECIDED_BY
        assert bool(claim.holds) != bool(claim.verdict), claim.id
        assert not claim.under or claim.holds, claim.id
        assert claim.verdict in ("", *ledger.VERDICTS), claim.id
        if claim.by in ("fake", "arithmetic", "result", "source") and claim.holds:
            assert claim.figures or "." in claim.holds, claim.id


def test_every_case_is_on_record() -> None:
    record = ledger.read_record()["measurements"]
    assert {name: set(one["steps"]) for name, one in record.items()} == {
        case.name: {"none", *case.policies} for case in CASES
    }


def test_the_page_is_what_the_data_renders_to() -> None:
    judged = ledger.judge(CASES, CLAIMS)
    assert ledger.page(THEMES, CASES, judged) == ledger.PAGE.read_text(encoding="utf-8"), (
        "write it again: python benchmarks/claims.py"
    )
    assert {row.verdict for row in judged} <= set(ledger.VERDICTS)
