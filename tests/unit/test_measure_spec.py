"""Settings of a run and its records: configurations, DeepSpeed files, options, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ckpt.activation.policies import policy_names
from ds_ckpt.cli.measure_arguments import model_of, sections_of
from ds_ckpt.config import parse
from ds_ckpt.errors import ConfigError, StateError, UnsupportedError
from ds_ckpt.lab.measure.samples import Memory, Store
from ds_ckpt.lab.measure.spec import (
    AXES,
    BASELINES,
    METHODS,
    Configuration,
    Spec,
    check,
    deepspeed_config,
)
from ds_ckpt.lab.measure.worker import build_model, check_batch, slowest
from ds_ckpt.lab.subject import run_forward
from tests.unit import measure_samples as known


def test_the_default_is_two_by_two_with_the_references() -> None:
    assert [one.name for one in Spec().configurations] == [
        f"{policy}/{method}"
        for policy in ("none", "block")
        for method in ("stock", "dense", "4bit", "no_comm")
    ]
    spec = Spec(policies=("none",), weights=("stock", "whole"), baselines=("zero1",))
    methods = ("stock", "dense", "4bit", "no_comm")
    names = [f"none/{method}{where}" for where in ("", "/whole") for method in methods]
    assert [one.name for one in spec.configurations] == [*names, "none/stock/zero1"]
    assert [Configuration.of(one.name) for one in spec.configurations] == spec.configurations


def test_every_policy_and_method_is_a_valid_file() -> None:
    """Policies and methods are those of the registries."""
    assert set(policy_names(planned=False)) <= set(AXES["activation"])
    spec = Spec(policies=tuple(AXES["activation"]), methods=tuple(METHODS))
    check(spec)
    for one in spec.configurations:
        config = deepspeed_config(spec, one, parameters=1000, start_step=3)
        plugin = parse(json.loads(json.dumps(config)), source=one.name)
        assert plugin.activation.active == (one.policy != "none")
        assert config["zero_optimization"]["reduce_bucket_size"] == 125
        if one.method in ("stock", "no_comm"):
            assert plugin.compression.method == "none"
        elif one.method != "dense":
            assert plugin.compression.warmup_steps == 3
            assert not plugin.compression.exchange.autotune


def test_every_placement_of_weights_is_a_valid_file() -> None:
    weights = ("whole", "lossless")
    spec = Spec(weights=weights, baselines=tuple(BASELINES), slots=2, bf16=True, accumulation=4)
    check(spec)
    zeros = {}
    for one in spec.configurations:
        config = deepspeed_config(spec, one, parameters=1000)
        plugin = parse(json.loads(json.dumps(config)), source=one.name)
        assert config["gradient_accumulation_steps"] == 4
        assert config["bf16"] == {"enabled": True}
        assert plugin.weights.resident == (one.weights in weights)
        if plugin.weights.resident:
            assert plugin.weights.deltas == {"whole": "none"}.get(one.weights, "lossless")
        if one.method in ("dense", "4bit"):
            assert plugin.compression.exchange.when == "accumulation_boundary"
        zero = config["zero_optimization"]
        zeros[one.weights] = (zero["stage"], zero.get("zero_hpz_partition_size"))
    three = dict.fromkeys(("stock", "whole", "lossless"), (3, None))
    assert zeros == {**three, "hpz": (3, 2), "zero2": (2, None), "zero1": (1, None)}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"method": "quantize", "exchange": {"when": "micro_step"}},
            {"exchange": {"when": "micro_step", "autotune": False}, "warmup_steps": 0},
        ),
        (
            {"method": "quantize", "quantize": {"bits": 8}, "warmup_steps": 7},
            {"warmup_steps": 0, "quantize": {"bits": 8}},
        ),
        (
            {"method": "dense", "rules": [{"match": "*", "method": "quantize"}]},
            {"exchange": {"when": "accumulation_boundary", "autotune": False}, "warmup_steps": 0},
        ),
    ],
)
def test_a_users_section_is_used(section: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = Spec(methods=("mine",), sections={"compression/mine": section}, accumulation=2)
    check(spec)
    config = deepspeed_config(spec, Configuration("none", "mine"), parameters=10)
    compression = config["ds_ckpt"]["compression"]
    assert compression["method"] == section["method"]
    assert {name: compression[name] for name in expected} == expected
    parse(json.loads(json.dumps(config)))


LOOPBACK: dict[str, Any] = {"where": "loopback", "hosts": 1, "slots": 2, "rates": (None,)}


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        (
            {"where": "loopback", "hosts": 1, "policies": ("block", "x"), "methods": ("zip",)},
            ["--policies", "--methods", "--policies", "--rates", "--hosts, --slots"],
        ),
        (
            {"weights": ("lossless", "half"), "baselines": ("hpz", "zero4"), "accumulation": 0},
            ["--weights", "--baselines", "--weights", "--baselines", "--accumulation"],
        ),
        ({**LOOPBACK, "weights": ("whole",)}, ["--weights"]),
        ({**LOOPBACK, "weights": ("stock",), "baselines": ("zero2",)}, []),
        ({"policies": ("none", "none")}, ["--policies"]),
        ({"tokens": 1, "batch": 0}, ["--tokens", "--batch"]),
        ({"shape": {"heads": 3}}, ["--shape"]),
        ({"shape": {"layers": 0}}, ["--shape"]),
        ({"model": "llama-7b", "shape": {"layers": 3}}, ["--shape"]),
        ({"model": "mine:make"}, ["--loss-steps, --text"]),
        ({"model": "mine:make", "loss_steps": 0, "tokens": 1}, []),
    ],
)
def test_settings_that_cannot_work_are_refused_together(
    settings: dict[str, Any], problems: list[str]
) -> None:
    if not problems:
        check(Spec(**settings))
        return
    with pytest.raises(ConfigError) as caught:
        check(Spec(**settings))
    assert [problem.where for problem in caught.value.problems] == problems


def _file(folder: Path, name: str, **plugin: Any) -> str:
    path = folder / name
    zero = {"zero_optimization": {"stage": 3}}
    content = {"train_micro_batch_size_per_gpu": 1, **zero, "ds_ckpt": plugin}
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_one_file_may_have_policy_method_and_weights(tmp_path: Path) -> None:
    plugin = {"activation": {"policy": "mlp"}, "compression": {"method": "quantize"}}
    plugin |= {"weights": {"resident": True}}
    both = _file(tmp_path, "both.json", **plugin)
    names, sections = sections_of(
        activation=f"none,{both}", compression=both, weights=f"whole,{both}"
    )
    assert sections == {f"{axis}/both": section for axis, section in plugin.items()}
    spec = Spec(policies=names["activation"], methods=names["compression"], sections=sections)
    check(spec)
    (one,) = [c for c in spec.configurations if c.name == "both/both"]
    written = deepspeed_config(spec, one, parameters=10)["ds_ckpt"]
    assert written["activation"] == plugin["activation"]
    assert written["compression"]["method"] == "quantize"


@pytest.mark.parametrize(
    ("axis", "name", "plugin", "found"),
    [
        ("activation", "none", {"activation": {"policy": "block"}}, "is a name already"),
        ("compression", "dense", {"compression": {"method": "topk"}}, "is a name already"),
        ("weights", "zero2", {"weights": {"resident": True}}, "is a name already"),
        ("compression", "x", {"activation": {"policy": "block"}}, "no ds_ckpt.compression"),
        ("activation", "x", {"compression": {"method": "topk"}}, "no ds_ckpt.activation"),
        ("activation", "x", {}, "no ds_ckpt.activation"),
    ],
)
def test_a_file_that_would_be_silently_another_configuration_is_refused(
    tmp_path: Path, axis: str, name: str, plugin: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        sections_of(**{axis: _file(tmp_path, f"{name}.json", **plugin)})


def test_a_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 256}))
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make(batch=1):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.randn(batch, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    named = model_of("config.json")
    assert named == str(tmp_path / "config.json")
    model, _ = build_model(Spec(model=named, tokens=8))
    again, _ = build_model(Spec(model=named, tokens=8))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    own = Spec(model=model_of("mine:make"), folder=str(tmp_path), loss_steps=0)
    own = replace(own, batch=5)
    model, batch = build_model(own)
    assert batch.shape == (5, 4)
    assert run_forward(model, batch).requires_grad
    check_batch(replace(own, tokens=1), batch)
    with pytest.raises(ConfigError, match="--batch 5 --tokens 1"):
        check_batch(replace(own, tokens=1, batch=4), batch)
    ids = {"input_ids": torch.zeros(2, 64, dtype=torch.int64)}
    check_batch(replace(own, tokens=64, batch=2), ids)
    with pytest.raises(UnsupportedError, match="no_such"):
        model_of("no_such/config.json")


def test_a_spec_is_loaded_as_saved(tmp_path: Path) -> None:
    spec = Spec(rates=(50.0, None), shape={"layers": 2}, weights=("whole",), baselines=("zero1",))
    spec.save(tmp_path)
    assert Spec.load(tmp_path) == spec != Spec()


def test_records_come_back_and_a_half_written_one_is_measured_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.read() == []
    samples = known.samples()
    assert len({one.key for one in samples}) == len(samples)
    store.append(samples[:5])
    store.append(samples[5:])
    assert store.read() == samples
    whole = store.path.read_bytes()
    store.path.write_bytes(whole[:-20])
    assert store.read() == samples[:-1]
    store.truncate_partial()
    store.append(samples[-1:])
    assert store.path.read_bytes() == whole


def test_of_equal_keys_the_last_record_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = Memory(policy="none", held_bytes=1, peak_bytes=2)
    second = first.model_copy(update={"peak_bytes": 3})
    store.append([first, second])
    assert store.read() == [second]
    store.path.write_text('{"kind": "trial"}\n')
    with pytest.raises(StateError, match="line 1"):
        store.read()


def test_each_step_is_that_of_the_slowest_process() -> None:
    fast, slow = known.step("none/stock", 400.0), known.step("none/stock", 100.0)
    assert slowest([[fast, slow, fast], [slow, fast, fast]]) == (slow, slow, fast)
