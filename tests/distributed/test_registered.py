"""A compressor that is registered from outside the package trains under ZeRO-3 from JSON."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import cases_registered as cases


def test_it_trains_and_sends_what_it_says(world2: Any) -> None:
    for ours, dense in world2.run(cases.trained, 12):
        assert ours["active"]
        assert ours["residuals"]
        # each step has a batch of its own, so a loss is held to that of dense on the same batch
        assert ours["losses"] == pytest.approx(dense["losses"], rel=0.05)
        assert ours["losses"] != dense["losses"]
        # a bit and 32 / 64 of a bit an entry against 32, norms uncompressed, headers
        assert 8 < dense["sent"] / ours["sent"] < 22


@pytest.mark.parametrize(("kind", "accumulation"), [("plain", 1), ("llama", 3)])
def test_nothing_is_lost(world2: Any, kind: str, accumulation: int) -> None:
    for process in world2.run(cases.conservation, kind, 4, accumulation):
        assert process["compressed"] > 3
        assert process["worst"] < 1e-5
