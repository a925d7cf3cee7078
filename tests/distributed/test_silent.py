"""`Session.send_no_gradients`: a ceiling that sends no gradient and still trains and gathers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import cases_silent as cases


@pytest.mark.parametrize(
    "section", [{}, {"compression": {"method": "topk", "warmup_steps": 0}}], ids=["none", "topk"]
)
def test_no_gradient_is_sent_and_training_goes_on(world2: Any, section: dict[str, Any]) -> None:
    for result in world2.run(cases.trained, section):
        assert result["reduce"] == 0
        assert result["gather"] > 0
        assert result["losses"][-1] < result["losses"][0]


def test_a_tensor_parallel_rank_trains_its_shards_on_its_own_gradients(world4: Any) -> None:
    assert world4.run(cases.foreign_gradients, timeout=240) == [[]] * 4
