"""The registry of compression methods: accepted and refused classes, and its users."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from virtual import World

from ds_ckpt.compression import Codec, Expects, Method, base, methods, register
from ds_ckpt.config import json_schema, parse
from ds_ckpt.config.compression import CompressionConfig, RuleConfig, exchange_settings
from ds_ckpt.config.verdicts import decisive
from ds_ckpt.errors import ConfigError
from ds_ckpt.exchange.assignment import Assignment
from tests import guide


@pytest.fixture
def sign() -> Iterator[type[Method]]:
    with guide.registered() as kind:
        yield kind


def config(**compression: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": compression}}


def problems(**compression: Any) -> dict[str, Any]:
    with pytest.raises(ConfigError) as caught:
        parse(config(**compression))
    return {p.where.removeprefix("$.ds_ckpt.compression."): p for p in caught.value.problems}


def test_names_that_mean_something_else_are_taken() -> None:
    static = {*CompressionConfig.model_fields, *RuleConfig.model_fields} - {*methods()}
    assert static <= base.RESERVED


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
    ("section", "where", "word"),
    [
        ({"sign": {"block": 7}}, "sign.block", "from 8 to 4096"),
        ({"sign": {"block": "64"}}, "sign.block", "in quotes it is text"),
        ({"sign": {"block": "auto"}}, "sign.block", "auto"),
        ({"sign": {"blok": 64}}, "sign.blok", 'did you mean "block"?'),
        ({"sign": 64}, "sign", "object in braces"),
        ({"topk": {"density": 0.1}}, "topk", 'method is "sign"'),
        ({"method": "topk", "sign": {"block": 64}}, "sign", 'method is "topk"'),
        ({"method": "sing"}, "method", '"sign"'),
        ({"rules": [{"match": "*", "method": "topk", "sign": {"block": 8}}]},)
        + ("rules[0].sign", 'method is "topk"'),
    ],
)
def test_its_wrong_settings_are_refused_as_ours_are(
    sign: type[Method], section: dict[str, Any], where: str, word: str
) -> None:
    problem = problems(**{"method": "sign", **section})[where]
    assert word in f"{problem.why} {problem.remedy}"


@pytest.mark.parametrize("local", [1, 2])
def test_nothing_is_lost_in_a_world_of_four(sign: type[Method], local: int) -> None:
    codec = sign()
    assert isinstance(codec, Codec)
    world, total = World(4, lambda name, shape: codec, local=local), torch.zeros(3000).double()
    delivered = total.clone()
    for _ in range(3):
        gradients = [[torch.randn(3000)] for _ in range(4)]
        shards = world.reduce(["w"], gradients)
        world.commit()
        delivered += torch.cat([s[0] for s in shards]).double()
        total += sum(g[0].double() for g in gradients) / 4
    residual = world.residual_sum("w", 3000)
    assert residual.abs().sum() > 0
    assert torch.allclose(delivered + residual, total, atol=1e-5)


def test_register_refuses_unusable_methods() -> None:
    class Named(Method):
        name = "rules"
        about = "taken"

    class Mute(Method):
        name = "mute"
        about = "explains nothing"
        size: int = 3

    class Needy(Method):
        name = "needy"
        about = "has no default"
        size: Annotated[int, Expects("a number", "3")] = Field(description="A size.")

    class Half(Method, Codec):
        name = "half"
        about = "does not unpack"

    class Again(Method):
        name = "topk"
        about = "another one"

    for kind, word in (
        (Named, "cannot be the name"),
        (Mute, "mute.size needs"),
        (Needy, "needy.size needs"),
        (Half, "half lacks .*pack_rows"),
        (Again, "is already the name of ds_ckpt.compression.topk.TopK"),
    ):
        with pytest.raises(ValueError, match=word):
            register(kind)
    assert {"rules", "mute", "needy", "half"}.isdisjoint(methods())


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
