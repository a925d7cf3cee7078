"""Surroundings in which a fake copy runs: fake arguments, random states, errors in words."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._pytree import tree_map

from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.planner.fake_copy import FakeCopy
from ds_ckpt.planner.values import KnownValues, UnknownValueError, taken_for_real


class Running(Protocol):
    """Knows the module in which a forward is, or where it stopped."""

    @property
    def running(self) -> str: ...


@contextmanager
def fake_run(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None
) -> Iterator[tuple[nn.Module, Any, Any]]:
    """The copy and its arguments; inside, every operator is fake. Random states stay."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = KnownValues(mode)
    twin = FakeCopy(model, mode, device).module

    def fake(leaf: Any) -> Any:
        return values.fake(leaf) if isinstance(leaf, Tensor) else leaf

    fake_args, fake_kwargs = tree_map(fake, list(args)), tree_map(fake, dict(kwargs))
    state = random.getstate()
    kinds = {p.device.type for p in twin.parameters()} - {"cpu", "meta"}
    try:
        with torch.random.fork_rng(
            devices=list(range(torch.cuda.device_count())) if "cuda" in kinds else []
        ):
            with mode, values, taken_for_real(), torch.enable_grad():
                yield twin, fake_args, fake_kwargs
    finally:
        random.setstate(state)


@contextmanager
def told_in_words(recorder: Running | None = None) -> Iterator[None]:
    """Turns what torch says of a forward that cannot run with fake tensors into our words."""
    try:
        yield
    except UnknownValueError as error:
        raise _refusal(recorder, error.operator, "the value of a tensor") from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _refusal(recorder, str(error.func), "the value of a tensor") from error
    except UnsupportedFakeTensorException as error:
        why = f"a kind of tensor that cannot be measured ({error})"
        raise _refusal(recorder, "an operator", why) from error


def _refusal(recorder: Running | None, operator: str, needs: str) -> UnsupportedError:
    where = recorder.running if recorder is not None else ""
    return UnsupportedError(
        Problem(
            where=f"the forward of {where or 'the model'}",
            found=f"{operator}, which needs {needs}",
            why="the model is measured with tensors that have shapes and no values, so what it "
            "saves cannot be foretold where a value decides",
            remedy='set "policy" to "block", "selective" or another that measures nothing, or '
            "replace what asks for the value (.item(), nonzero, an if on a tensor)",
        )
    )
