"""`check_determinism`: recomputes that differ are stopped, and the block is named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, PolicySettings
from ds_ckpt.activation.fingerprints import WHOLE_BYTES, FingerprintCache, fingerprint
from ds_ckpt.errors import RecomputeError
from tests.architectures import batch, build
from tests.unit.stacks import Block, Stack, data, put


class Injected(nn.Module):
    """Stands around a module and spoils its result in every second call: in the recompute."""

    def __init__(self, module: nn.Module, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.spoil = spoil
        self.calls = itertools.count()  # a number would be put back for the recompute

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = self.module(*args, **kwargs)
        return self.spoil(result) if next(self.calls) % 2 == 1 else result


def _one_bit(x: Tensor) -> Tensor:
    """One entry moved by one unit in its last place."""
    x = x.clone()
    flat = x.view(-1)
    at = random.randrange(len(flat))
    flat[at] = torch.nextafter(flat[at].detach(), flat.new_tensor(99.0))
    return x


SPOILS: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": _one_bit,
    "noise": lambda x: x + 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9)),
    "own random numbers": lambda x: x * (1 + 1e-5 * random.random()),
    "a row": lambda x: torch.cat([x[:1], x[1:] * 1.001]),
    "another order of summation": lambda x: (x + 0.1) - 0.1,
}
# A part whose result backward needs. (What o_proj and down_proj return is only added up.)
PARTS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "input_layernorm")


@pytest.mark.parametrize("seed", range(25))
def test_every_injected_difference_is_caught_and_named(seed: int) -> None:
    random.seed(seed)
    spoil = list(SPOILS.values())[seed % len(SPOILS)]
    part = PARTS[seed // len(SPOILS) % len(PARTS)]
    layer = random.randrange(4)
    model = build("llama")
    place, _, name = f"model.layers.{layer}.{part}".rpartition(".")
    parent = model.get_submodule(place)
    setattr(parent, name, Injected(getattr(parent, name), spoil))
    kinds = ("block", "segments", "selective", "block")
    settings = PolicySettings(kinds[seed % 4])  # type: ignore[arg-type]
    if settings.policy == "selective":  # a result that is taken from memory cannot differ
        settings = PolicySettings("selective", save_ops=("attention",))
    CheckpointedBlocks(model, policy=Policy(settings, check_determinism=1))
    with pytest.raises(RecomputeError, match=rf"model\.layers\.{layer}: found saved tensor"):
        model(**batch("llama", seed)).loss.backward()


def test_without_the_check_the_gradients_would_be_wrong_silently() -> None:
    """The injection is one that torch's comparison of shapes does not see."""
    gradients = []
    for spoiled in (False, True):
        model = build("llama")
        if spoiled:
            mlp = model.get_submodule("model.layers.1.mlp")
            mlp.up_proj = Injected(mlp.up_proj, SPOILS["a row"])
        CheckpointedBlocks(model)
        model(**batch("llama")).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert not all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "bert", "t5", "vit"])
@pytest.mark.parametrize("policy", ["block", "attention", "mlp", "segments", "selective"])
def test_what_repeats_itself_is_let_through(kind: str, policy: Any) -> None:
    model = build(kind)
    CheckpointedBlocks(model, policy=Policy(PolicySettings(policy), check_determinism=1))
    for seed in range(2):
        model(**batch(kind, seed)).loss.backward()


def test_every_nth_forward_is_compared() -> None:
    model = build("llama")
    mlp = model.get_submodule("model.layers.3.mlp")
    mlp.up_proj = Injected(mlp.up_proj, SPOILS["a row"])
    CheckpointedBlocks(model, policy=Policy(check_determinism=3))
    caught = []
    for _ in range(7):
        mlp.up_proj.calls = itertools.count()
        try:
            model(**batch("llama")).loss.backward()
            caught.append(False)
        except RecomputeError:
            caught.append(True)
    assert caught == [True, False, False] * 2 + [True]


def _wider(x: Tensor) -> Tensor:
    return torch.cat([x, x.exp()], dim=-1)[..., : x.shape[-1]]


def _other_shape(x: Tensor) -> Tensor:
    return x.transpose(0, 1).exp().log().transpose(0, 1)


@pytest.mark.parametrize("spoil", [_wider, _other_shape, lambda x: x.double().exp().log().float()])
def test_another_number_or_shape_of_tensors_is_named_without_the_check(
    spoil: Callable[[Tensor], Tensor],
) -> None:
    model = build("llama")
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.gate_proj = Injected(mlp.gate_proj, spoil)
    CheckpointedBlocks(model)
    with pytest.raises(RecomputeError, match=r"model\.layers\.1: found"):
        model(**batch("llama")).loss.backward()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(16, 16, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x[None])[0][0]  # type: ignore[no-any-return]


def test_work_space_of_recurrent_layers_is_let_through() -> None:
    model = Stack(lambda: Block(Recurrent()))
    put(model, "block", check=1)
    for seed in range(20):
        model(data(seed)).backward()


# fingerprints

_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool]
_DTYPES += [torch.complex64]


def _random(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(*shape, 2, generator=generator).view(torch.complex64)[..., 0]
    values = 100 * torch.rand(shape, generator=generator)
    return values > 50 if dtype == torch.bool else values.to(dtype)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(_DTYPES),
    view=st.sampled_from(["plain", "transposed", "strided", "expanded", "offset"]),
    data=st.data(),
)
def test_a_fingerprint_depends_on_every_entry(
    shape: list[int], dtype: torch.dtype, view: str, data: st.DataObject
) -> None:
    def seen(x: Tensor) -> Tensor:
        views: dict[str, Callable[[], Tensor]] = {
            "plain": lambda: x,
            "transposed": lambda: x.transpose(0, -1),
            "strided": lambda: torch.stack([x, x], -1)[..., 0],
            "expanded": lambda: x.unsqueeze(0).expand(3, *x.shape),
            "offset": lambda: torch.cat([x.flatten()[:1], x.flatten()])[1:],
        }
        return views[view]()

    x = _random(shape, dtype, 1)
    changed = x.clone()
    at = data.draw(st.integers(0, x.numel() - 1))
    flat = changed.view(-1)
    flat[at] = ~flat[at] if dtype == torch.bool else flat[at] + 1
    before, same, after = (fingerprint(seen(t)) for t in (x, x.clone(), changed))
    assert before is not None
    assert same is not None
    assert after is not None
    assert before.dtype == torch.int64
    assert int(before) == int(same)
    assert int(before) != int(after)


def test_large_tensors_are_sampled_in_every_row() -> None:
    x = torch.randn(2 * WHOLE_BYTES // 4096, 1024)
    before = fingerprint(x)
    for row in range(0, len(x), 97):
        changed = x.clone()
        changed[row] *= 1.0001
        assert int(fingerprint(changed) or 0) != int(before or 0)


@pytest.mark.parametrize(
    "tensor", [torch.empty(0, 3), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()]
)
def test_what_has_no_memory_to_read_has_no_fingerprint(tensor: Tensor) -> None:
    assert fingerprint(tensor) is None


@pytest.mark.parametrize(
    ("bookkeeping", "read"),
    [
        (torch.zeros(2, dtype=torch.uint64), False),
        (torch.zeros(5, dtype=torch.uint64), False),
        (torch.zeros((), dtype=torch.int64), False),
        (torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(3, dtype=torch.int64), True),
        (torch.zeros(2, dtype=torch.bool), True),
        (torch.zeros(99, dtype=torch.uint8), False),
        (torch.zeros(9, 9, dtype=torch.uint8), True),
        (torch.zeros((), dtype=torch.float32), True),
        (torch.zeros((), dtype=torch.complex64), True),
    ],
    ids=lambda v: f"{v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else None,
)
def test_bookkeeping_of_attention_kernels_is_not_read(bookkeeping: Tensor, read: bool) -> None:
    assert (FingerprintCache()(bookkeeping) is not None) is read
