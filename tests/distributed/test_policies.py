"""Every policy on many architectures under ZeRO-3 with two processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.architectures import ARCHITECTURES, OFTEN
from tests.distributed import cases_policies

CHECKPOINTING = [p for p in cases_policies.POLICIES if p != "none"]
ALL = [(policy, offload) for policy in CHECKPOINTING for offload in (False, True)]
ALL.remove(("offload", False))
SOME = [("block", False), ("selective", True)]
OTHERS = tuple(kind for kind in ARCHITECTURES if kind not in OFTEN)
THIRDS = tuple(OTHERS[i::3] for i in range(3))


@pytest.mark.parametrize(
    ("kinds", "policies"),
    [
        (("llama",), ALL),
        (("t5", "mixtral", "vit"), SOME),
        *(pytest.param(kinds, ALL, marks=pytest.mark.slow) for kinds in (OFTEN[1:], *THIRDS)),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else f"{len(given)} ways",
)
def test_gradients_are_bitwise_those_of_no_checkpointing(
    world2: Any, kinds: tuple[str, ...], policies: list[tuple[str, bool]]
) -> None:
    """And no weight is gathered more often than twice a step, none is left gathered."""
    for results in world2.run(cases_policies.compare, kinds, policies, timeout=280):
        assert len(results) == len(kinds) * len(policies)
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
                assert sum(out.values()) > 0, name
                assert sum(back.values()) > 0, name
                # what the last block saves, too, is on the device in backward
                assert all(back.get(block, 0) <= n for block, n in out.items()), name
