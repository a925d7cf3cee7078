"""Tensors are found in every usual container, and the call is put together as it was."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ds_ckpt.activation.checkpoint import Arguments


class Pair(NamedTuple):
    first: Tensor
    second: int


X = torch.randn(3)
CONTAINERS = [
    Pair(X, 2),
    OrderedDict(a=X, b=1),
    BaseModelOutput(last_hidden_state=X),
    {"a": [X, (X, Pair(X, 1))]},
]


def tensors_in(value: Any) -> list[Tensor]:
    return Arguments(lambda: None, (value,), {}).tensors


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda v: type(v).__name__)
def test_tensors_are_taken_out_and_put_back(value: Any) -> None:
    apart = Arguments(print, (value,), {"key": value})
    assert all(tensor is X for tensor in apart.tensors)
    others = [torch.zeros(3) for _ in apart.tensors]
    (again,), kwargs = apart.put_together(others, apart.others)
    assert type(again) is type(value)
    found = tensors_in(again) + tensors_in(kwargs["key"])
    assert [id(t) for t in found] == [id(t) for t in others]
    assert all(t is X for t in tensors_in(value)), "the caller's own is unchanged"


def test_parameters_and_strange_objects_stay() -> None:
    given = (nn.Parameter(torch.ones(2)), object(), torch.Size([2]), Pair)
    apart = Arguments(print, given, {})
    assert apart.tensors == []
    args, _ = apart.put_together([], apart.others)
    assert all(one is other or one == other for one, other in zip(args, given, strict=True))
