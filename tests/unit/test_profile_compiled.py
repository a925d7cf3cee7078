"""What the compiler captures of models whose graph breaks are known."""

from __future__ import annotations

import pytest

from ds_ckpt.lab.estimate.compiled import compile_report
from ds_ckpt.lab.estimate.observe import built_fake, footprints
from ds_ckpt.lab.estimate.policies import blocks_of, compared
from ds_ckpt.lab.estimate.profiles import Compiled
from ds_ckpt.lab.subject import Sizes, find_subject
from tests.unit.profile_models import WIDTH

MODULES = ["layers.*"]
ROWS = 2 * 8 * WIDTH * 4
"""Bytes of what goes into a block."""


def _report(name: str) -> Compiled:
    subject = find_subject(f"tests.unit.profile_models:{name}", Sizes())
    wanted = compared(("block",), MODULES, None)[1:]
    (block,) = footprints(subject, 2, wanted, MODULES)
    made = built_fake(subject, 2)
    blocks, _ = blocks_of(made.model, MODULES)
    return compile_report(made, blocks, block)


@pytest.fixture(scope="module")
def whole() -> Compiled:
    return _report("stack")


@pytest.fixture(scope="module")
def broken() -> Compiled:
    return _report("stack_with_a_break")


def test_a_model_without_breaks_is_captured_whole(whole: Compiled) -> None:
    assert (whole.graphs, whole.breaks) == (1, ())
    assert whole.captured_flops == whole.flops > 0
    assert whole.captured_operators == whole.operators
    assert [b.captured_operators for b in whole.blocks] == [b.operators for b in whole.blocks]


def test_the_partitioner_recomputes_what_is_cheap(whole: Compiled) -> None:
    # of a chain of four operators autograd holds a value each; the cut holds what went in first
    chains = _report("chains")
    assert [b.eager_bytes for b in chains.blocks] == [4 * ROWS, 3 * ROWS, 3 * ROWS]
    assert [b.compiled_bytes for b in chains.blocks] == [0, 0, 0]
    assert (chains.eager_held_bytes, chains.min_cut_bytes) == (10 * ROWS, ROWS)
    assert not any(b.needs_policy for b in chains.blocks)
    # the result of a GELU goes into a product of the backward: torch keeps it
    assert [b.compiled_bytes for b in whole.blocks] == [9 * ROWS] * 3 + [8 * ROWS]
    assert whole.min_cut_bytes == whole.eager_held_bytes


def test_what_still_holds_more_than_its_input_needs_a_policy(whole: Compiled) -> None:
    assert all(b.compiled_bytes > 2 * b.checkpointed_bytes for b in whole.blocks)
    assert all(b.needs_policy for b in whole.blocks)


def test_a_break_is_counted_and_its_place_is_told(broken: Compiled) -> None:
    assert broken.graphs >= 2
    assert broken.breaks
    assert any("profile_models.py" in b.where for b in broken.breaks)
    assert all(b.reason for b in broken.breaks)


def test_what_surrounds_a_break_is_captured_all_the_same(broken: Compiled) -> None:
    assert 0 < broken.captured_flops <= broken.flops
    for block in broken.blocks:
        assert block.captured_operators <= block.operators
