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
def test_tensors_come_out_and_go_in_again(value: Any) -> None:
    apart = Arguments(print, (value,), {"key": value})
    assert all(tensor is X for tensor in apart.tensors)
    other = torch.zeros(3)
    (again,), kwargs = apart.put_together([other] * len(apart.tensors), apart.others)
    assert type(again) is type(value)
    assert again is not value
    assert all(t is other for t in tensors_in((again, kwargs)))
    assert all(t is X for t in tensors_in(value)), "the caller's own is as it was"


def test_parameters_and_strange_objects_stay() -> None:
    parameter, strange = nn.Parameter(torch.ones(2)), object()
    apart = Arguments(print, (parameter, strange, torch.Size([2]), Pair), {})
    assert apart.tensors == []
    args, _ = apart.put_together([], apart.others)
    assert args[0] is parameter
    assert args[1] is strange
    assert args[2] == torch.Size([2])
    assert args[3] is Pair


def test_a_model_output_keeps_its_attributes_and_keys_alike() -> None:
    apart = Arguments(print, (BaseModelOutput(last_hidden_state=X),), {})
    zeros = torch.zeros(3)
    (again,), _ = apart.put_together([zeros], apart.others)
    assert again.last_hidden_state is zeros
    assert again["last_hidden_state"] is zeros
    assert again.to_tuple() == (zeros,)
