"""Choice of a compressor for each tensor: rules, built-in rules, and the plan."""

from __future__ import annotations

import pytest
import torch

from ds_ckpt.compression import LowRank, Quantize, TopK
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.exchange.assignment import Assignment
from ds_ckpt.exchange.method_rules import MethodRule, MethodSettings, Rules

SHAPES = [
    ("embed.weight", torch.Size([32000, 64]), 2),
    ("layers.0.q.weight", torch.Size([64, 64]), 2),
    ("layers.0.conv.weight", torch.Size([64, 16, 3, 3]), 2),
    ("layers.0.norm.weight", torch.Size([64]), 2),
    ("layers.0.tiny.weight", torch.Size([4, 4]), 2),
]


def rules(method: str, *given: MethodRule, **settings: object) -> Rules:
    default = MethodSettings(method, **settings)  # type: ignore[arg-type]
    return Rules(default, rules=given, embeddings=frozenset({"embed.weight"}))


def test_built_in_rules() -> None:
    choose = rules("powersgd", rank=4)
    assert [choose(n, s) for n, s, _ in SHAPES] == [TopK(), LowRank(4), LowRank(4), None, None]
    assert rules("quantize")("embed.weight", torch.Size([32000, 64])) == Quantize()
    assert choose("embed.weight", torch.Size([256, 64])) == LowRank(4)
    assert choose("tied.weight", torch.Size([32000, 64])) == LowRank(4)


def test_a_rank_as_large_as_the_matrix_leaves_it_uncompressed() -> None:
    assert rules("powersgd", rank=64)("w", torch.Size([64, 64])) is None


def test_of_nothing_nothing_is_compressed() -> None:
    rule = MethodRule("$", "w", MethodSettings("topk"))
    for choose in (rules("powersgd", rule), Rules(MethodSettings("entropy_coded"), min_numel=0)):
        assert choose("w", torch.Size([5, 0])) is None
        assert choose("w", torch.Size([0])) is None


def test_the_first_rule_that_fits_decides() -> None:
    choose = rules(
        "quantize",
        MethodRule("r0", "*.q.*", MethodSettings("powersgd", rank=2), dims=2),
        MethodRule("r1", "layers.*", MethodSettings("topk", density=0.1), min_numel=64),
        MethodRule("r2", "*", MethodSettings("dense"), max_numel=15),
    )
    found = [choose(n, s) for n, s, _ in SHAPES]
    assert found == [Quantize(), LowRank(2), TopK(density=0.1), TopK(density=0.1), None]
    choose.check([(n, s) for n, s, _ in SHAPES[:4]] + [("b", torch.Size([3]))])


def test_rules_that_cannot_work_are_refused_together() -> None:
    choose = rules(
        "dense",
        MethodRule("$.rules[0]", "*.norm.*", MethodSettings("powersgd")),
        MethodRule("$.rules[1]", "*.missing.*", MethodSettings("topk")),
        MethodRule("$.rules[2]", "*", MethodSettings("topk")),
        MethodRule("$.rules[3]", "embed*", MethodSettings("topk")),
    )
    with pytest.raises(UnsupportedError) as caught:
        choose.check((n, s) for n, s, _ in SHAPES)
    problems = {p.where: p for p in caught.value.problems}
    assert set(problems) == {"$.rules[0]", "$.rules[1]", "$.rules[3]"}
    assert "layers.0.norm.weight" in problems["$.rules[0]"].found
    assert SHAPES[0][0] in problems["$.rules[1]"].remedy


def test_the_plan_adds_up() -> None:
    plan = Assignment.of(rules("powersgd", rank=4), SHAPES, world=8)
    assert plan.dense_bytes == sum(2 * s.numel() for _, s, _ in SHAPES)
    by_compressor = plan.by_compressor()
    assert sum(n for n, _, _ in by_compressor.values()) == len(SHAPES)
    assert sum(sent for _, _, sent in by_compressor.values()) == plan.sent_bytes
    q = next(t for t in plan.tensors if t.name == "layers.0.q.weight")
    assert q.how == "PowerSGD rank 4"
    assert q.sent_bytes == 2 * 4 * 4 * (64 + 64)
    assert plan.share == plan.sent_bytes / plan.dense_bytes


def test_rows_that_a_host_divides_have_a_right_factor_each() -> None:
    shapes = [("w", torch.Size([1024, 1024]), 2)]
    plans = [Assignment.of(rules("powersgd", rank=4), shapes, 2, local) for local in (1, 2, 4)]
    assert [p.sent_bytes for p in plans] == [4 * 4 * 1024 * (1 + local) for local in (1, 2, 4)]
    high = MethodSettings("powersgd", rank=64)
    assert Rules(high)("w", torch.Size([1024, 1024])) == LowRank(64)
    assert Rules(high, local=8)("w", torch.Size([1024, 1024])) is None
