"""`check_determinism`: recomputes that differ are stopped, and the block is named."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, make_policy
from ds_ckpt.activation.fingerprints import WHOLE_BYTES, FingerprintCache, fingerprint
from ds_ckpt.errors import RecomputeError
from tests.architectures import batch, build


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
    "own random numbers": lambda x: x * (1 + 1e-5 * random.random()),
    "a row": lambda x: torch.cat([x[:1], x[1:] * 1.001]),
}
# A part whose result backward needs. (What o_proj and down_proj return is only added up.)
PARTS = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "input_layernorm")


@pytest.mark.parametrize("seed", range(12))
def test_every_injected_difference_is_caught_and_named(seed: int) -> None:
    random.seed(seed)
    spoil = list(SPOILS.values())[seed % len(SPOILS)]
    part = PARTS[seed // len(SPOILS) % len(PARTS)]
    layer = random.randrange(4)
    model = build("llama")
    place, _, name = f"model.layers.{layer}.{part}".rpartition(".")
    parent = model.get_submodule(place)
    setattr(parent, name, Injected(getattr(parent, name), spoil))
    # of results that are taken from memory none can differ
    selective = make_policy("selective", save_ops=("attention",))
    kinds = (make_policy("block"), make_policy("segments"), selective, make_policy("block"))
    settings = kinds[seed % 4]
    CheckpointedBlocks(model, policy=Policy(settings, check_determinism=1))
    with pytest.raises(RecomputeError, match=rf"model\.layers\.{layer}: found saved tensor"):
        model(**batch("llama", seed)).loss.backward()


@pytest.mark.parametrize("kind", ["llama", "mixtral", "t5", "vit"])
@pytest.mark.parametrize("policy", ["block", "attention", "mlp", "segments", "selective"])
def test_a_repeatable_recomputation_passes(kind: str, policy: Any) -> None:
    model = build(kind)
    CheckpointedBlocks(model, policy=Policy(make_policy(policy), check_determinism=1))
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


@pytest.mark.parametrize("to", [lambda x: x.double(), lambda x: x.transpose(0, 1)])
def test_another_number_or_shape_of_tensors_is_named_without_the_check(to) -> None:
    model = build("llama")
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.gate_proj = Injected(mlp.gate_proj, lambda x: to(to(x).exp().log()).float())
    CheckpointedBlocks(model)
    with pytest.raises(RecomputeError, match=r"model\.layers\.1: found"):
        model(**batch("llama")).loss.backward()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 1, 5)])
def test_a_fingerprint_depends_on_every_entry(shape, dtype, view) -> None:
    x = torch.ones(shape, dtype=dtype)
    before, same = (fingerprint(VIEWS[view](t)) for t in (x, x.clone()))
    assert before is not None
    assert torch.equal(before, same)  # type: ignore[arg-type]
    for at in range(x.numel()):
        changed = x.clone()
        changed.view(-1)[at] = 0
        after = fingerprint(VIEWS[view](changed))
        assert int(before) != int(after)  # type: ignore[arg-type]


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
def test_a_tensor_without_readable_memory_has_no_fingerprint(tensor: Tensor) -> None:
    assert fingerprint(tensor) is None


@pytest.mark.parametrize(
    ("bookkeeping", "read"),
    [
        (torch.zeros(5, dtype=torch.uint64), False),
        (torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(3, dtype=torch.int64), True),
        (torch.zeros(2, dtype=torch.bool), True),
        (torch.zeros(99, dtype=torch.uint8), False),
        (torch.zeros((), dtype=torch.float32), True),
    ],
    ids=lambda v: f"{v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else None,
)
def test_bookkeeping_of_attention_kernels_is_not_read(bookkeeping: Tensor, read: bool) -> None:
    assert (FingerprintCache()(bookkeeping) is not None) is read
