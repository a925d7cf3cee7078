"""Policies on many architectures and adapters: gradients to the bit, what is held and saved."""

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ckpt.activation import CheckpointedBlocks, Policy, Rule, make_policy
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.telemetry.memory import SavedActivations
from tests.architectures import ARCHITECTURES, OFTEN, batch, build
from tests.unit.stacks import Stack

SLOW = pytest.mark.slow
POLICIES: dict[str, Policy] = {
    **{n: Policy(make_policy(n)) for n in ("block", "attention", "mlp", "selective")},
    "every_n": Policy(make_policy("every_n", every_n=3)),
    "segments": Policy(make_policy("segments", segment_size=3)),
    "rules": Policy(
        make_policy("block"),
        (
            Rule("0", make_policy("none")),
            Rule("1", make_policy("selective", save_ops=("matmuls",))),
            Rule("2-3", make_policy("segments")),
        ),
    ),
}


def step(model: nn.Module, kind: str) -> tuple[dict[str, torch.Tensor], float, int]:
    """Gradients by name, the loss, and bytes held between forward and backward."""
    torch.manual_seed(5)
    model.zero_grad()
    with SavedActivations(model) as held:
        loss = model(**batch(kind)).loss
    loss.backward()
    named = model.named_parameters()
    gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
    return gradients, float(loss.detach()), held.bytes


def _attributes(model: nn.Module) -> list[dict[str, Any]]:
    names = ("forward", "gradient_checkpointing", "_gradient_checkpointing_func")
    names += ("_set_gradient_checkpointing",)
    return [{n: vars(m)[n] for n in names if n in vars(m)} for m in model.modules()]


@functools.cache
def plain(kind: str) -> tuple[dict[str, torch.Tensor], float, int]:
    return step(build(kind), kind)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param(k, p, marks=() if k in OFTEN or p in ("block", "selective") else SLOW)
        for k in ARCHITECTURES
        for p in POLICIES
    ],
)
def test_gradients_are_bitwise_those_of_no_checkpointing(kind: str, policy: str) -> None:
    expected, loss, held = plain(kind)
    model = build(kind)
    before = _attributes(model)
    checkpointed = CheckpointedBlocks(model, policy=POLICIES[policy])
    for _ in range(2):  # the second step finds everything as the first did
        got, got_loss, got_held = step(model, kind)
        assert got_loss == loss
        assert got.keys() == expected.keys()
        differing = [n for n in expected if not torch.equal(expected[n], got[n])]
        assert not differing, differing[:5]
        assert got_held < held
    checkpointed.remove()
    assert _attributes(model) == before


def _held(policy: Policy | None, kind: str = "llama") -> int:
    model = build(kind)
    if policy is not None:
        CheckpointedBlocks(model, policy=policy)
    return step(model, kind)[2]


BOUNDARY = 2 * 11 * 16 * 4
"""Bytes of a block's input in these models: batch x tokens x width x fp32."""


def test_segments_keep_one_boundary_each() -> None:
    block = _held(Policy())
    for size, segments in ((2, 2), (3, 2), (4, 1), (9, 1)):
        segmented = _held(Policy(make_policy("segments", segment_size=size)))
        # what the last block returns is kept by the norm behind it, checkpointed or not
        assert block - segmented == (4 - segments) * BOUNDARY


def test_every_n_keeps_the_inside_of_the_others() -> None:
    none, block = _held(None), _held(Policy())
    inside = (none - block) // 4  # of one block, without its boundary
    for n, checkpointed in ((2, 2), (3, 2), (4, 1)):
        held = _held(Policy(make_policy("every_n", every_n=n)))
        assert none - held == pytest.approx(checkpointed * inside, rel=0.01)  # masks are shared


def test_parts_lie_between_nothing_and_whole_blocks() -> None:
    none, block = _held(None), _held(Policy())
    for kind in ("attention", "mlp"):
        assert block < _held(Policy(make_policy(kind))) < none


def test_more_saved_operators_hold_more() -> None:
    wider = ("attention", "attention+qkvo", "attention+qkvo+gate", "matmuls")
    selected = [Policy(make_policy("selective", save_ops=(sets,))) for sets in wider]
    held = [_held(policy) for policy in (Policy(), *selected, None)]
    assert sorted(set(held)) == held


def _adapted(config: Any) -> nn.Module:
    from peft import get_peft_model

    base: Any = build("llama", use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        model: nn.Module = get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad and not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.1)  # zeros would leave others without a gradient
    return model


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model(**batch("llama")).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _configs() -> dict[str, Any]:
    from peft import IA3Config, LoraConfig, PromptTuningConfig

    names = ["q_proj", "v_proj", "down_proj"]
    task = {"task_type": "CAUSAL_LM"}
    return {
        "lora": LoraConfig(r=2, target_modules=names, lora_dropout=0.1),
        "lora in one layer": LoraConfig(r=2, target_modules=names, layers_to_transform=[2]),
        "dora": LoraConfig(r=2, target_modules=names, use_dora=True),
        "ia3": IA3Config(target_modules=names, feedforward_modules=["down_proj"], **task),
        "prompts": PromptTuningConfig(num_virtual_tokens=4, **task),
    }


@pytest.mark.parametrize("kind", ["block", "attention", "mlp", "segments", "selective"])
@pytest.mark.parametrize("name", list(_configs()))
def test_adapters(name: str, kind: Any) -> None:
    """Without `enable_input_require_grads`: no input of a block below the first adapter needs a
    gradient."""
    models = [_adapted(_configs()[name]) for _ in range(2)]
    CheckpointedBlocks(models[1], policy=Policy(make_policy(kind)))
    plain, ours = map(_by_name, models)
    trainable = {n for n, p in models[0].named_parameters() if p.requires_grad}
    assert plain.keys() == ours.keys() == trainable
    assert all(bool(g.any()) for g in plain.values())
    assert all(torch.equal(plain[n], ours[n]) for n in plain)


def test_prefix_tuning_is_refused_with_the_block() -> None:
    """Its prefix is a filled cache; transformers' own checkpointing refuses to prepare it, too."""
    from peft import PrefixTuningConfig

    model = _adapted(PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    assert len(_by_name(model)) > 0
    CheckpointedBlocks(model, policy=Policy(make_policy("attention")))
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn: .*with 4 positions"):
        _by_name(model)


def _put(h: Tensor, x: Tensor) -> Tensor:
    rows = torch.tensor([1, 0], device=h.device)
    return h.index_put_((rows,), x[:2], accumulate=True)


def _through_a_view(h: Tensor, x: Tensor) -> Tensor:
    h[..., 1:3].add_(x[..., 1:3])
    return h


def _as_result(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(h.detach(), 3.0, out=h.detach())
    return h + x


def _in_a_list(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_add_([x.clone(), h.detach()], 1.0)
    return h


def _outside_autograd(h: Tensor, x: Tensor) -> Tensor:
    h.data.add_(1.0)
    return h


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda h, x: h.add_(x),
    "mul_": lambda h, x: h.mul_(2.0),
    "relu_": lambda h, x: torch.relu_(h),
    "index_put_": _put,
    "a view": _through_a_view,
    "out=": _as_result,
    "_foreach_add_": _in_a_list,
    ".data": _outside_autograd,
}


class Block(nn.Module):
    """A product, a write over its result, and a second product."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor], bias: bool, matmul: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=bias)
        self.second = nn.Linear(8, 8, bias=bias)
        self.write, self.matmul = write, matmul

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.first.weight if self.matmul else self.first(x)
        return torch.add(x, self.second(torch.tanh(self.write(h, x))))


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("product", ["linear with bias", "matmul"])
@pytest.mark.parametrize("write", WRITES)
def test_results_that_are_written_over_are_not_kept(write, product, shape) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"bias": "bias" in product, "matmul": product == "matmul"}
    model = nn.Sequential(*(Block(WRITES[write], **settings) for _ in range(2)))
    x = torch.randn(*shape)
    expected = _gradients(model, x)
    policy = Policy(settings=make_policy("selective"), modules=("Block",))
    CheckpointedBlocks(model, policy=policy)
    for _ in range(2):
        got = _gradients(model, x)
        assert len(got) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class _Drawing(nn.Module):
    """Draws noise, whose values are saved, and after it dropout, which is drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = torch.tanh(h * torch.rand_like(h))
        return x + self.second(nn.functional.dropout(h, 0.4))


@pytest.mark.parametrize("save_ops", [("aten.rand_like",), ("matmuls", "aten.rand_like")], ids=str)
def test_random_numbers_after_saved_ones_are_those_of_the_forward(save_ops) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(_Drawing(), _Drawing()), torch.randn(4, 8)
    found = []
    for checkpointed in (False, True, True):
        if checkpointed and len(found) == 1:
            settings = make_policy("selective", save_ops=save_ops)
            CheckpointedBlocks(model, policy=Policy(settings, modules=("_Drawing",)))
        torch.manual_seed(1)
        found.append([*_gradients(model, x), torch.get_rng_state()])
    for got in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, found[0], strict=True))


class _Both(nn.Module):
    """Hands out a product that it also uses, by a result, an argument or an attribute."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.way = way

    def forward(self, x: torch.Tensor, given: types.SimpleNamespace) -> Any:
        h = self.a(x)
        y = self.b(torch.tanh(h))
        if self.way == "tuple":
            return y, h
        if self.way == "object":
            return types.SimpleNamespace(y=y, h=h)
        (given if self.way == "argument" else self).h = h
        return y


TAKEN: dict[str, Callable[[Any, Any, Any], tuple[Tensor, Tensor]]] = {
    "tuple": lambda result, given, block: result,
    "object": lambda result, given, block: (result.y, result.h),
    "argument": lambda result, given, block: (result, given.h),
    "attribute": lambda result, given, block: (result, block.h),
}


@pytest.mark.parametrize("way", TAKEN)
@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8)])
def test_a_product_that_others_can_write_into_is_not_kept(shape: tuple[int, ...], way: str) -> None:
    def join(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            given = types.SimpleNamespace()
            y, h = TAKEN[way](block(x, given), given, block)
            h += x
            x = h * y
        return x

    model, x = Stack(lambda: _Both(way), join, blocks=2), torch.randn(shape)
    plain = _gradients(model, x)
    CheckpointedBlocks(model, policy=Policy(make_policy("selective"), modules=("_Both",)))
    ours = _gradients(model, x)
    assert len(plain) == len(ours) == 4
    assert all(map(torch.equal, plain, ours))
