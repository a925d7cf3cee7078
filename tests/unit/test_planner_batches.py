"""What is remembered of a batch, and which batches a plan must be made for."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ds_ckpt.activation.planning.fake import MOST_ELEMENTS
from ds_ckpt.engine.agreement import Sample, not_smaller, size_of

CPU = torch.device("cpu")


def _of(**kwargs: Any) -> Sample:
    return Sample.of((), kwargs, CPU)


def test_large_masks_are_not_held() -> None:
    mask = torch.ones(1, 1, 1025, 1024, dtype=torch.bool)
    assert mask.numel() > MOST_ELEMENTS
    ids = torch.ones(2, 8, dtype=torch.long)
    sample = _of(input_ids=ids, attention_mask=mask, pixels=torch.zeros(2, 3))
    assert isinstance(sample.kwargs["attention_mask"], FakeTensor)
    assert isinstance(sample.kwargs["pixels"], FakeTensor)
    assert not isinstance(sample.kwargs["input_ids"], FakeTensor)  # its values decide on masks
    assert sample.tokens == 16


def test_what_else_decides_what_is_saved_tells_batches_apart() -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    mask, features = torch.ones_like(ids), torch.zeros(2, 8)
    found = [
        _of(input_ids=ids, labels=ids),
        _of(input_ids=ids, attention_mask=mask),
        _of(input_ids=ids, labels=ids, output_hidden_states=True),
        _of(input_ids=ids, labels=ids, output_hidden_states=False),
        _of(input_ids=ids, labels=features),
        _of(input_ids=ids, labels=torch.zeros(2, 8, requires_grad=True)),
    ]
    assert len({s.shapes for s in found}) == len(found)
    assert _of(input_ids=ids, labels=ids).shapes == found[0].shapes


def test_work_grows_with_every_tensor() -> None:
    ids = torch.ones(2, 64, dtype=torch.long)
    short, long = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 32, dtype=torch.long)
    before, after = size_of((), {"ids": ids, "labels": short}), size_of((ids, long), {})
    assert before[0] == after[0] == 128
    assert after[1] > before[1]
    images = [torch.zeros(n, 3, 8, 8) for n in (1, 4)]
    one, four = (size_of((ids,), {"pixel_values": i}) for i in images)
    assert four[1] > one[1]


def test_batches_that_another_beats_are_left_out() -> None:
    def tokens(rows: int, length: int) -> Sample:
        return _of(ids=torch.ones(rows, length, dtype=torch.long))

    many, long, small = tokens(6, 16), tokens(1, 40), tokens(1, 16)
    assert [s.tokens for s in not_smaller([many, long, small, tokens(6, 16)])] == [96, 40]
    assert [s.tokens for s in not_smaller([small])] == [16]
