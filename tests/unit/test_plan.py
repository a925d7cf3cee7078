"""Units of policies: blocks and parts found by name, segments, rules, and refusals."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_ckpt.activation import (
    CheckpointedBlocks,
    Policy,
    Rule,
    find_blocks,
    make_policy,
    make_units,
)
from ds_ckpt.activation.blocks import gates
from ds_ckpt.errors import ConfigError
from tests.architectures import ARCHITECTURES, batch, build
from tests.unit.estimate_models import Stack

ATTENTION = {
    "gpt2": ["attn"],
    "gpt_neox": ["attention"],
    "bloom": ["self_attention"],
    "bert": ["attention"],
    "vit": ["attention"],
    "t5": ["layer.0", "layer.1"],
    "bart": ["self_attn", "encoder_attn"],
    "falcon": ["self_attention"],
}
MLP = {
    "opt": ["fc1", "activation_fn", "fc2"],
    "bart": ["fc1", "activation_fn", "fc2"],
    "bert": ["intermediate", "output"],
    "t5": ["layer.1", "layer.2"],
}


def _tails(model: nn.Module, kind: Any) -> set[str]:
    blocks = [u.blocks[0].name for u in make_units(model, Policy())]
    names = [b.name for u in make_units(model, Policy(make_policy(kind))) for b in u.blocks]
    return {n.removeprefix(b + ".") for n in names for b in blocks if n.startswith(b + ".")}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_attention_and_mlp_are_found_by_what_they_are_called(kind: str) -> None:
    model = build(kind, 2)
    assert len(find_blocks(model, None)) == 2 + 2 * (kind in ("t5", "bart"))
    assert _tails(model, "attention") == set(ATTENTION.get(kind, ["self_attn"]))
    assert _tails(model, "mlp") == set(MLP.get(kind, ["mlp"]))


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_parts_that_cannot_be_found_must_be_named(kind: Any) -> None:
    policy = Policy(make_policy("none"), (Rule("1-2", make_policy(kind)),), modules=("Mixer",))
    with pytest.raises(ConfigError) as caught:
        make_units(Stack(5), policy)
    (problem,) = caught.value.problems
    assert problem.where == "$.ds_ckpt.activation.rules[0].policy"
    assert '"modules"' in problem.remedy
    named = make_units(Stack(5), Policy(make_policy(kind), modules=("layers.*.up",)))
    assert [u.blocks[0].name for u in named] == [f"layers.{i}.up" for i in range(5)]


@given(blocks=st.integers(1, 9), size=st.integers(2, 5), every=st.integers(2, 5))
def test_segments_and_every_n_cover_what_they_say(blocks: int, size: int, every: int) -> None:
    model = Stack(blocks)
    how = make_policy("segments", segment_size=size)
    units = make_units(model, Policy(how, modules=("Mixer",)))
    names = [b.name for u in units for b in u.blocks]
    assert names == [f"layers.{i}" for i in range(blocks)]
    assert all(len(u.blocks) == size for u in units[:-1])
    units = make_units(model, Policy(make_policy("every_n", every_n=every), modules=("Mixer",)))
    assert [u.blocks[0].name for u in units] == [f"layers.{i}" for i in range(0, blocks, every)]


@pytest.mark.parametrize(
    ("blocks", "how", "sizes"),
    [
        (5, {}, [2, 2, 1]),
        (9, {"segment_size": "sqrt"}, [3, 3, 3]),
        (7, {"segment_size": "sqrt"}, [2, 2, 3]),
        (1, {"segment_size": "sqrt"}, [1]),
        (7, {"segments": 4}, [1, 2, 2, 2]),
        (3, {"segments": 9}, [1, 1, 1]),
    ],
)
def test_segments_by_their_number(blocks: int, how: dict[str, Any], sizes: list[int]) -> None:
    units = make_units(Stack(blocks), Policy(make_policy("segments", **how), modules=("Mixer",)))
    assert [len(unit.blocks) for unit in units] == sizes
    assert [b.name for u in units for b in u.blocks] == [f"layers.{i}" for i in range(blocks)]


def test_segments_end_where_a_container_or_a_class_ends() -> None:
    units = make_units(build("t5", 3), Policy(make_policy("segments", segment_size=9)))
    assert [[b.name for b in u.blocks] for u in units] == [
        [f"{side}.block.{i}" for i in range(3)] for side in ("encoder", "decoder")
    ]


def test_the_first_rule_that_names_a_block_decides() -> None:
    rules = (
        Rule("0-1", make_policy("none")),
        Rule("layers.[12]", make_policy("selective", save_ops=("aten.mm",))),
        Rule("4", make_policy("segments")),
    )
    units = make_units(Stack(5), Policy(make_policy("block"), rules, modules=("Mixer",)))
    found = [([b.name for b in u.blocks], u.save_ops) for u in units]
    assert found == [(["layers.2"], ("aten.mm",)), (["layers.3"], ()), (["layers.4"], ())]


@pytest.mark.parametrize(
    "row", ["7 -> 0: no block", "3-9,4 -> 1: earlier", "0,head.* -> 1: no block"]
)
def test_rules_that_name_nothing_are_refused(row: str) -> None:
    names, place, why = re.split(" -> |: ", row)
    rules = tuple(Rule(name, make_policy("none")) for name in names.split(","))
    policy = Policy(rules=rules, modules=("Mixer",))
    with pytest.raises(ConfigError) as caught:
        make_units(Stack(5), policy)
    (problem,) = caught.value.problems
    assert problem.where == f"$.ds_ckpt.activation.rules[{place}].match"
    assert why in problem.why
    assert "0-4" in problem.remedy


def _selective(*save_ops: str) -> Policy:
    return Policy(make_policy("selective", save_ops=save_ops), modules=("Mixer",))


REFUSED = "matmul: matmuls, aten.nosuch: sets, mm: no such operator, aten.name: no such operator"
REFUSED += ", aten.add_: result cannot be kept, qkvo: no part that looks, gate: no part that"


@pytest.mark.parametrize(("name", "word"), [row.split(": ") for row in REFUSED.split(", ")])
def test_operators_that_cannot_be_saved_are_refused(name: str, word: str) -> None:
    model = Stack(5)
    with pytest.raises(ConfigError) as caught:
        CheckpointedBlocks(model, policy=_selective("aten.addmm+" + name))
    (problem,) = caught.value.problems
    assert problem.where == "$.ds_ckpt.activation.save_ops"
    assert name in problem.found
    assert word in problem.why + problem.remedy
    assert all("forward" not in vars(m) for m in model.modules()), "nothing has been changed"


def test_the_guides_policy_with_a_setting_is_used_from_json() -> None:
    """One file and one registration; configuration, rules, plan, planner and profile read it."""
    from ds_ckpt.activation import policies, register_policy
    from ds_ckpt.config import json_schema, parse
    from ds_ckpt.config.activation import activation_policy

    def read(**activation: Any) -> Any:
        section = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": activation}}
        return parse(section).activation

    with pytest.raises(ConfigError, match='found "first_part"'):
        read(policy="first_part")
    guide = (Path(__file__).parents[2] / "docs" / "activation.md").read_text()
    code = guide.split("### Add a policy")[1].split("```python")[1].split("```")[0]
    exec(compile(code, "the guide", "exec", dont_inherit=True), {"__name__": "guide"})
    try:
        config = read(policy="first_part", share=0.5)
        assert config.summary() == "checkpointing first_part 50%"
        assert '"first_part": the first blocks. "budget"' in str(json_schema())
        with pytest.raises(ConfigError, match=r'save_ops: found \["matmuls"\]'):
            read(policy="first_part", save_ops="matmuls")
        with pytest.raises(ConfigError, match=r"share: found 0.5\n    why: ignored while"):
            read(policy="block", share=0.5)
        with pytest.raises(ConfigError, match=r"share: found 2"):
            read(policy="first_part", share=2)
        with pytest.raises(ConfigError, match='"first_part", "budget" or "auto"'):
            read(policy="no such one")
        plain, model = build("llama"), build("llama")
        on = CheckpointedBlocks(model, policy=activation_policy(config))
        assert [b.name for b in on.blocks] == ["model.layers.0", "model.layers.1"]
        for one in (plain, model):
            one(**batch("llama")).loss.backward()
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
        rule = {"match": "1-3", "policy": "first_part", "share": 0.34}
        ruled = make_units(model, activation_policy(read(policy="none", rules=[rule])))
        assert [unit.blocks[0].name for unit in ruled] == ["model.layers.1"]
        with pytest.raises(ValueError, match='a policy "first_part" already'):
            register_policy(policies.POLICIES["first_part"])
    finally:
        del policies.POLICIES["first_part"]
    with pytest.raises(ConfigError):
        read(policy="first_part")


def with_head() -> nn.Module:
    model = Stack(3)
    model.head = nn.Linear(2, 2)
    return model


def test_by_class_name_and_by_pattern() -> None:
    names = ["layers.0", "layers.1", "layers.2"]
    assert [b.name for b in find_blocks(with_head(), ["Mixer"])] == names
    assert [b.name for b in find_blocks(with_head(), ["layers.?"])] == names
    assert [b.name for b in find_blocks(with_head(), ["layers.1", "head"])] == ["layers.1", "head"]


def test_every_pattern_without_a_match_is_reported() -> None:
    with pytest.raises(ConfigError) as error:
        find_blocks(with_head(), ["Mixr", "layers.*", "nothing.*"])
    (problem,) = error.value.problems
    assert problem.found == '"Mixr", "nothing.*"'
    assert "Mixer" in problem.remedy


def _modules(*names: str, **others: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, module in {**{name: nn.Linear(2, 2) for name in names}, **others}.items():
        made.add_module(name, module)
    return made


class Experts(nn.Module):
    """Experts as in Hugging Face: parameters of three dimensions, and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 2, 2))


GATED = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("mlp", "first"),
    [
        (_modules(*GATED), ["mlp.gate_proj"]),
        (_modules("up_proj", "down_proj"), ["mlp.up_proj"]),  # Nemotron
        (_modules("gate", experts=Experts()), []),  # Mixtral: "gate" is the router
        (
            _modules("gate", experts=Experts(), shared_experts=_modules(*GATED)),
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
        find_blocks(with_head(), None)
    problem = error.value.problems[0]
    assert problem.where == "$.ds_ckpt.activation.modules"
    assert '["Mixer"]' in problem.remedy


def test_containers_have_no_forward_to_recompute() -> None:
    with pytest.raises(ConfigError, match="name the items"):
        find_blocks(with_head(), ["layers"])
    found = find_blocks(with_head(), ["*layers*", "Linear"])
    assert [b.name for b in found] == ["layers.0", "layers.1", "layers.2", "head"]
