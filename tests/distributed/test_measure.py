"""Engines of several configurations in the same processes do not disturb each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_ckpt.lab.measure.findings import _interface_excess
from ds_ckpt.lab.measure.samples import Store, Trial
from ds_ckpt.lab.measure.spec import Spec
from tests.distributed import cases_measure as cases


def test_engines_beside_hpz_keep_what_is_theirs(world4: Any) -> None:
    """DeepSpeed has one hpZ group for the whole program, and takes it for every later engine."""
    shares = {"none/stock": 0.25, "none/stock/hpz": 0.25 + 0.5, "none/stock/zero2": 1.0}
    names = ["none/stock/hpz", "none/stock", "none/stock/zero2"]
    for found in world4.run(cases.stored_weights, names):
        assert found == pytest.approx(shares, rel=0.02)


def test_other_programs_traffic_moves_no_byte_and_is_reported(world2: Any, tmp_path: Path) -> None:
    """Their bytes pass the same loopback interface."""
    world2.run(cases.trials_beside_traffic, str(tmp_path))
    found = {s.key[1::2]: s for s in Store(tmp_path).read() if isinstance(s, Trial)}
    spec = Spec("loopback", hosts=1, slots=2)
    for name in ("block/dense", "block/topk"):
        alone, beside = found[name, 0], found[name, 1]
        counted, again = (sum(one.far_bytes.values()) for one in (alone, beside))
        assert counted == pytest.approx(again, rel=0.01)
        assert beside.interface_bytes > 1.1 * alone.interface_bytes
        assert (_interface_excess(spec, [beside]) or 0.0) > 0.02
        assert counted == sum(alone.purpose_bytes.values())
    freed = [
        sum(found["block/dense", n].far_bytes.values())
        - sum(found["block/topk", n].far_bytes.values())
        for n in (0, 1)
    ]
    assert freed[0] == pytest.approx(freed[1], rel=0.01)
    assert freed[0] > 0
