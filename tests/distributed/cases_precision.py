"""Run in the worker processes: 16 bits, offloaded parameters and two levels, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from deepspeed.accelerator import get_accelerator

from ds_ckpt.engine import gradients, resident_weights
from ds_ckpt.engine.step import StepState
from ds_ckpt.zero3.weights_hook import WeightsHook
from tests.distributed.cases_levels import hosts

T = TypeVar("T")


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """DeepSpeed refuses fp16 on CPUs because it is slow there; torch computes it all the same."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


def on(slots: list[int], case: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Another case, on hosts with so many processes each, in any precision."""
    with hosts(slots), fp16_on_cpu():
        return case(*arguments, **options)


def preallocated(slots: list[int], case: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Another case, whose exchanges are preallocated at attach as on an accelerator."""
    with (
        patch.object(gradients, "on_host", lambda device: False),
        patch.object(resident_weights, "on_host", lambda device: False),
        patch.object(
            WeightsHook, "preallocate", autospec=True, side_effect=WeightsHook.preallocate
        ) as w,
        patch.object(
            StepState, "preallocate", autospec=True, side_effect=StepState.preallocate
        ) as g,
    ):
        found = on(slots, case, *arguments, **options)
        assert [call.kwargs["sends"] for call in g.call_args_list] == [False, True]
        assert w.call_count == 1
    return found
