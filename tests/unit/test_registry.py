"""Methods: the registry, its users, and the rules that choose one for each tensor."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from test_exchange import Case, check_law_3
from virtual import World, assemble

from ds_ckpt.compression import Codec, LowRank, Method, Quantize, TopK, base, methods, register
from ds_ckpt.config import json_schema, parse
from ds_ckpt.config.compression import exchange_settings, with_methods
from ds_ckpt.config.verdicts import decisive
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.exchange.assignment import Assignment
from ds_ckpt.exchange.method_rules import MethodRule, MethodSettings, Rules
from tests import guide
from tests.unit.test_config_problems import check_row


@pytest.fixture
def sign() -> Iterator[type[Method]]:
    with guide.registered() as kind:
        yield kind


def config(**compression: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": compression}}


@pytest.mark.parametrize("name", ["rules", "start_step", "max_numel", "lossy"])
def test_names_that_mean_something_else_are_taken(sign: type[Method], name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        with_methods({name: sign})


def test_a_method_from_outside_is_known_from_json_to_the_wire(sign: type[Method]) -> None:
    found = parse(config(**guide.section()))
    assert "signs in blocks of 64" in found.summary()
    settings = exchange_settings(found.compression)
    choose = settings.choose()
    shapes = [("w", torch.Size([64, 64]), 2), ("embed", torch.Size([64, 64]), 2)]
    plan = Assignment.of(choose, shapes, world=2)
    assert [t.how for t in plan.tensors] == ["signs in blocks of 64", "signs in blocks of 32"]
    assert [t.sent_bytes for t in plan.tensors] == [4 * 64 + 512, 4 * 128 + 512]
    assert decisive(found.compression)["sign.block"] == 64
    definitions = json_schema()["$defs"]
    assert definitions["Sign"]["properties"]["block"]["minimum"] == 8
    assert "sign" in definitions["CompressionConfig"]["properties"]["method"]["enum"]
    assert "sign" in definitions["RuleConfig"]["properties"]


@pytest.mark.parametrize(
    "row",
    [
        "c.sign.block=7 -> c.sign.block: from_8_to_4096",
        'c.sign.block="64" -> c.sign.block: in_quotes_it_is_text',
        "c.sign.block=auto -> c.sign.block: auto",
        'c.sign.blok=64 -> c.sign.blok: did_you_mean_"block"?',
        "c.sign=64 -> c.sign: object_in_braces",
        'c.topk.density=0.1 -> c.topk: method_is_"sign"',
        'c.method=topk c.sign.block=64 -> c.sign: method_is_"topk"',
        'c.method=sing -> c.method: "sign"',
        'c.rules=[{"match":"*","method":"topk","sign":{"block":8}}] -> c.rules[0].sign: is_"topk"',
    ],
)
@pytest.mark.usefixtures("sign")
def test_its_wrong_settings_are_refused_as_ours_are(row: str) -> None:
    check_row(f"c.method=sign {row}")


@pytest.mark.parametrize("local", [1, 2])
def test_nothing_is_lost_in_a_world_of_four(sign: type[Method], local: int) -> None:
    codec = sign()
    assert isinstance(codec, Codec)
    check_law_3(Case(4, [(50, 60)], torch.float32, 0, local), codec, 1, 3, 1.0)


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "cannot be the name"),
    "mute": ({"__annotations__": {"size": int}, "size": 3}, "mute.size needs"),
    "needy": (
        {"__annotations__": {"size": Annotated[int, base.Expects("a number", "3")]}}
        | {"size": Field(description="No default.")},
        "needy.size needs",
    ),
    "half": ({}, "half lacks .*pack_rows"),
    "topk": ({}, "is already the name of ds_ckpt.compression.topk.TopK"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_register_refuses_unusable_methods(name: str) -> None:
    body, word = UNUSABLE[name]
    bases = (Method, Codec) if name == "half" else (Method,)
    body = {"__module__": __name__, "name": name, "about": "of no use", **body}
    with pytest.raises(ValueError, match=word):
        register(type("Unusable", bases, body))
    assert name == "topk" or name not in methods()


@pytest.mark.usefixtures("sign")
def test_a_method_may_take_a_majority_vote() -> None:
    """Its residuals are those of the payloads, and no vote hides a NaN."""
    case = Case(3, [(50, 6)], torch.float32, 0)
    gradients = case.gradients()
    codecs = [methods()[name]().build() for name in ("sign", "vote")]
    assert codecs[1].describe() == "majority vote of signs in blocks of 256"
    worlds = [World(3, lambda *_, codec=codec: codec) for codec in codecs]
    _, found = (assemble(world.reduce(case.names, gradients, 8.0), 0) for world in worlds)
    assert found.equal(8.0 * sum(gradient.sign() for (gradient,) in gradients).sign().flatten())
    for world in worlds:
        world.commit()
    assert worlds[0].residual_sum("p0", 300).equal(worlds[1].residual_sum("p0", 300))
    gradients[0][0][0, 0] = torch.nan
    assert assemble(worlds[1].reduce(case.names, gradients, 8.0), 0).isnan().all()


BROKEN: dict[str, dict[str, Any]] = {
    "no multiple of 8": {"packed_bytes": lambda self, numel: 4 + numel},
    "loses a part": {"pack_rows": lambda self, values, out: (out.zero_(), values.zero_())},
    "wrote different bytes": {"pack_rows": lambda self, values, out: values.zero_()},
    "pack_rows gives inf or NaN": {
        "pack_rows": lambda self, values, out: (
            out.zero_(),
            values.div_(values.norm(dim=1)[:, None]),
        )
    },
    "reduce_rows gives inf": {"reduce_rows": lambda self, sent, own, scale: own.div_(own.norm())},
    "excludes a reduce_rows": {
        "uses_preconditioner": property(lambda self: True),
        "reduce_rows": lambda self, sent, own, scale: None,
    },
    "row inf": {"pack_rows": lambda self, values, out: out.fill_(0 * int(values[2, 0]))},
}


@pytest.mark.parametrize("word", BROKEN)
def test_register_refuses_a_codec_that_breaks_its_contract(sign: type[Method], word: str) -> None:
    body = {"__module__": __name__, "name": "broken", **BROKEN[word]}
    with pytest.raises(ValueError, match=word):
        register(type("Broken", (sign,), body))
    assert "broken" not in methods()
    for codec in (method() for method in methods().values() if issubclass(method, Codec)):
        base._check_codec(codec)


def test_entry_points_of_other_packages_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(value: str) -> None:
        point = EntryPoint("sign", value, base.ENTRY_POINTS)
        monkeypatch.setattr(base, "entry_points", lambda group: [point] if group else [])
        base._load_entry_points.cache_clear()

    with guide.registered():
        base.unregister("sign")
        found("my_signs:Sign")
        assert methods()["sign"].about.startswith("one bit")
        found("no_such_module:Sign")
        with pytest.raises(ValueError, match=r"'sign' of another package.*no_such_module"):
            methods()
    monkeypatch.undo()
    base._load_entry_points.cache_clear()
    assert "sign" not in methods()


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
    assert len(plan.tensors) == len(SHAPES)
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
