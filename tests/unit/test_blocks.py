"""Finding blocks: Hugging Face's layers, patterns, and what must be refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_ckpt.activation import find_blocks
from ds_ckpt.activation.blocks import gates
from ds_ckpt.errors import ConfigError
from tests.architectures import build


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(2, 2)


def test_by_class_name_and_by_pattern() -> None:
    names = ["layers.0", "layers.1", "layers.2"]
    assert [b.name for b in find_blocks(Model(), ["Block"])] == names
    assert [b.name for b in find_blocks(Model(), ["layers.?"])] == names
    assert [b.name for b in find_blocks(Model(), ["layers.1", "head"])] == ["layers.1", "head"]


def test_every_pattern_without_a_match_is_reported() -> None:
    with pytest.raises(ConfigError) as error:
        find_blocks(Model(), ["Blok", "layers.*", "nothing.*"])
    (problem,) = error.value.problems
    assert problem.found == '"Blok", "nothing.*"'
    assert "Block" in problem.remedy


def _modules(*names: str, **others: nn.Module) -> nn.Module:
    made = nn.Module()
    for name in names:
        made.add_module(name, nn.Linear(2, 2))
    for name, module in others.items():
        made.add_module(name, module)
    return made


class Experts(nn.Module):
    """Experts as in Hugging Face: parameters of three dimensions, and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 2, 2))


@pytest.mark.parametrize(
    ("mlp", "first"),
    [
        (_modules("gate_proj", "up_proj", "down_proj"), ["mlp.gate_proj"]),
        (_modules("up_proj", "down_proj"), ["mlp.up_proj"]),  # Nemotron
        (_modules("gate", experts=Experts()), []),  # Mixtral: "gate" is the router
        (
            _modules(
                "gate",
                experts=Experts(),
                shared_experts=_modules("gate_proj", "up_proj", "down_proj"),
            ),
            ["mlp.shared_experts.gate_proj"],
        ),
        (
            _modules("gate", experts=nn.ModuleList([_modules("w1", "w2", "w3") for _ in range(2)])),
            ["mlp.experts.0.w1", "mlp.experts.1.w1"],
        ),
    ],
)
def test_the_first_product_of_an_mlp_is_no_router(mlp: nn.Module, first: list[str]) -> None:
    names = {module: f"mlp.{name}" for name, module in mlp.named_modules()}
    assert [names[module] for module in gates([[("mlp", mlp)]])] == first


def test_of_a_chain_the_widening_is_the_first_product() -> None:
    """BERT's."""
    dense, output = nn.Linear(2, 4), nn.Linear(4, 2)
    chain = [("b.intermediate", _modules(dense=dense)), ("b.output", _modules(dense=output))]
    assert gates([chain]) == [dense]


def test_a_plain_model_must_name_its_blocks() -> None:
    with pytest.raises(ConfigError) as error:
        find_blocks(Model(), None)
    problem = error.value.problems[0]
    assert problem.where == "$.ds_ckpt.activation.modules"
    assert '["Block"]' in problem.remedy


def test_containers_have_no_forward_to_recompute() -> None:
    with pytest.raises(ConfigError, match="name the items"):
        find_blocks(Model(), ["layers"])
    found = find_blocks(Model(), ["*layers*", "Linear"])
    assert [b.name for b in found] == ["layers.0", "layers.1", "layers.2", "head"]


@pytest.mark.parametrize(("kind", "layers"), [("llama", 2), ("bert", 2), ("t5", 4), ("vit", 2)])
def test_hugging_face_layers_are_found(kind: str, layers: int) -> None:
    assert len(find_blocks(build(kind, 2), None)) == layers
