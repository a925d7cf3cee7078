"""Every policy on many architectures under ZeRO-3 with two processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.architectures import ARCHITECTURES
from tests.distributed import cases_policies

CHECKPOINTING = [p for p in cases_policies.POLICIES if p != "none"]
QUARTERS = [list(ARCHITECTURES[i::4]) for i in range(4)]


@pytest.mark.parametrize("kinds", QUARTERS, ids=" ".join)
def test_gradients_are_bitwise_those_of_no_checkpointing(world2: Any, kinds: list[str]) -> None:
    """And no weight is gathered more often than twice a step, none is left gathered."""
    for results in world2.run(cases_policies.compare, kinds, CHECKPOINTING, timeout=280):
        assert len(results) == 2 * len(kinds) * len(CHECKPOINTING)
        for name, result in results.items():
            assert result["equal"], name
            assert result["nonzero"], name
            assert result["losses"], name
            assert result["more"] == {}, name
            assert result["left"] == [], name
            assert result["stack"] == 0, name
            assert "checkpointing on" in result["summary"], name
            if name.endswith(" offload"):
                out, back = result["out_and_back"]
                assert out == back > 0, name
