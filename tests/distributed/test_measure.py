"""Engines of several configurations in the same processes do not disturb each other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import cases_measure as cases


def test_engines_beside_hpz_keep_what_is_theirs(world4: Any) -> None:
    """DeepSpeed has one hpZ group for the whole program, and takes it for every later engine."""
    shares = {"none/stock": 0.25, "none/stock/hpz": 0.25 + 0.5, "none/stock/zero2": 1.0}
    names = ["none/stock/hpz", "none/stock", "none/stock/zero2"]
    for found in world4.run(cases.stored_weights, names):
        assert found == pytest.approx(shares, rel=0.02)
