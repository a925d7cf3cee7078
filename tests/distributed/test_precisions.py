"""Real engines in bf16 and fp16 and with offloaded parameters, and steps that end in exceptions."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ds_ckpt.engine import gradients, resident_weights
from ds_ckpt.engine.step import StepState
from ds_ckpt.zero3.weights_hook import WeightsHook
from tests.distributed import models
from tests.distributed.models import quantize_section
from tests.distributed.pool import ranks
from tests.distributed.test_compression import OPTIONS, SECTIONS
from tests.distributed.training import check_no_trace, fp16_on_cpu, largest_gap, trained

SLOW = pytest.mark.slow


@pytest.mark.parametrize("options", ["bf16", "fp16", "parameters offloaded"])
@pytest.mark.sampled(2)
@ranks(2)
def test_it_trains_as_plain_deepspeed_does(options: str) -> None:
    """8 bits are as good as everything; an update of the wrong scale, or none, would show."""
    with fp16_on_cpu():
        expected, ours = (
            trained("llama", section, 12, lr=3e-4, **OPTIONS[options])
            for section in ({}, quantize_section(quantize={"bits": 8}))
        )
    assert ours.residuals
    assert ours.skipped == expected.skipped == 0
    assert largest_gap(expected.losses, ours.losses) < 5e-3


@pytest.mark.parametrize(
    ("how", "words"), [("least scale", "already at minimum"), ("early", "no memory")]
)
@ranks(2)
def test_a_step_that_ends_in_an_exception_leaves_nothing(how: str, words: str) -> None:
    """Its gradient is not finite, and DeepSpeed cannot halve the loss scale any more; or it ends
    before the verdict."""

    def break_off(engine: Any) -> None:
        loss = models.loss_of(engine(**models.batch("llama", 77, dist.get_rank())))
        engine.backward(loss * (math.inf if dist.get_rank() == 1 else 1))
        if how == "early":
            engine.optimizer._partition_all_parameters = _no_memory
        with pytest.raises(Exception, match=words):
            engine.step()
        vars(engine.optimizer).pop("_partition_all_parameters", None)

    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 1}
    with fp16_on_cpu():
        check_no_trace(break_off, 1, quantize_section(), fp16=fp16)


def _no_memory() -> None:
    raise MemoryError("no memory")


@contextmanager
def _preallocated() -> Iterator[None]:
    """Exchanges are preallocated at attach as on an accelerator."""

    def watched(owner: Any) -> Any:
        return patch.object(owner, "preallocate", autospec=True, side_effect=owner.preallocate)

    with (
        patch.object(gradients, "on_host", lambda device: False),
        patch.object(resident_weights, "on_host", lambda device: False),
        watched(WeightsHook) as of_weights,
        watched(StepState) as of_gradients,
    ):
        yield
    assert [call.kwargs["sends"] for call in of_gradients.call_args_list] == [False, True]
    assert [call.kwargs["sends"] for call in of_weights.call_args_list] == [False, True]


@pytest.mark.parametrize(
    ("slots", "section", "accumulation"),
    [([1, 1], "everything", 1), pytest.param([2, 2], "3 bits", 2, marks=SLOW)],
)
@ranks()
def test_an_exchange_that_is_preallocated_at_attach_changes_no_bit(section, accumulation) -> None:
    resident = {**SECTIONS[section], "weights": {"resident": True, "deltas": "none"}}
    with _preallocated():
        ours = trained("llama", resident, 3, accumulation=accumulation)
    plain = trained("llama", resident, 3, accumulation=accumulation)
    assert ours.residuals.keys() == plain.residuals.keys() != set()
    assert all(residual.equal(ours.residuals[name]) for name, residual in plain.residuals.items())
    assert ours.losses == plain.losses
    assert ours.weights == plain.weights
    assert ours.skipped == plain.skipped
