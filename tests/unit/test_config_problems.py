"""One table of configurations and the problems that each is refused with, by JSON path.

A row: `keys -> path: word | path: word`. Keys are `path=value` with JSON or a bare word as value;
a. c. w. t. stand for the sections of `ds_ckpt`, d. for `activation_checkpointing`, z. for
`zero_optimization`, whose stage is 3 unless the row has another. The paths are all that are
reported; a word is part of what was found, why, or the remedy. No path: the row is accepted.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_ckpt.config import parse
from ds_ckpt.errors import ConfigError

_SECTIONS = {
    "a": "ds_ckpt.activation",
    "c": "ds_ckpt.compression",
    "w": "ds_ckpt.weights",
    "t": "ds_ckpt.telemetry",
    "d": "activation_checkpointing",
    "z": "zero_optimization",
}
ROWS = """
a.policy=blok -> a.policy: did_you_mean_"block"
a.Policy=block -> a.Policy: "policy"
a.kind=block -> a.kind: the_keys_here_are
a.policy=block a.check=1 -> a.check: the_keys_here
a.policy=block a.share_gather=1 -> a.share_gather: a_valid_boolean
a.policy=block a.modules="Block" -> a.modules: a_list
a.policy=block a.modules=["Block",3,""] -> a.modules[1]: names | a.modules[2]: names
a.policy=block a.modules=["Block","auto"] -> a.modules[1]: not_one_of_them
a.modules=["Block"] -> a.modules: while_a.policy_is_"none"
a.share_gather=true -> a.share_gather: set_a.policy_to_"block"
a.policy=block a.save_ops=["matmuls"] -> a.save_ops: "selective"
a.policy=block a.rules=[{"match":"0","policy":"mlp","segment_size":2}] -> a.rules[0].segment_size: "mlp"
a.policy=segments a.segment_size=sqrt ->
a.policy=segments a.segment_size=1 -> a.segment_size: or_"sqrt"
a.policy=segments a.segment_size=2 a.segments=4 -> a.segments: set_a.segment_size_to_null
a.policy=block a.segments=4 -> a.segments: "segments"
a.policy=offload a.offload_min_bytes=0 a.offload_prefetch=2 ->
a.policy=block a.offload_min_bytes=0 -> a.offload_min_bytes: set_a.offload_to_true
a.policy=auto a.offload=false a.offload_min_bytes=0 ->
a.policy=offload a.share_gather=true a.partition=true -> a.share_gather: "offload" | a.partition: "offload"
a.policy=offload a.rules=[{"match":"0","policy":"block"}] a.check_determinism=true ->
a.policy=block z.stage=2 ->
a.policy=block z.stage=2 a.share_gather=false -> z.stage: ZeRO_stage_3_only
a.policy=block a.rules=[{"policy":"block"}] -> a.rules[0].match: found_nothing
a.policy=block a.rules=[{"match":"","policy":"blok"}] -> a.rules[0].match: pattern | a.rules[0].policy: "block"
a.policy=block a.rules=[{"match":"0","policy":"budget"}] -> a.rules[0].policy: must_be
a.policy=block a.rules=[{"match":"0","policy":"block","modules":["A"]}] -> a.rules[0].modules: not_a_key
a.policy=block a.rules=["0-3"] -> a.rules[0]: a_list_of_objects
a.policy=block a.contiguous=true -> a.contiguous: remove_it
a.policy=budget a.budget_gib=6.0 a.budget_of=saved -> a.budget_of: were_removed
a.policy=budget -> a.budget_gib: 6.0
a.policy=auto ->
a.policy=auto a.budget_of=activations -> a.budget_of: set_a.budget_gib_to_6.0
a.policy=block a.budget_gib=6.0 a.budget_of=activations -> a.budget_gib: "budget" | a.budget_of: "budget"
a.policy=budget a.budget_gib=0 -> a.budget_gib: greater_than_0
a.policy=budget a.budget_gib=6.0 a.every_n=3 -> a.every_n: "budget"
a.policy=budget a.budget_gib=6.0 a.rules=[{"match":"0","policy":"block"}] -> a.rules: every_block
a.policy=auto a.partition=true -> a.partition: plan_does_not_count
a.policy=auto z.stage=2 -> z.stage: a.budget_of_to_"activations"_and_a.budget_gib
a.policy=budget a.budget_gib=4.0 a.budget_of=accelerator z.stage=1 -> z.stage: budget_of
a.policy=budget a.budget_gib=4.0 z.stage=0 ->
d.cpu_checkpointing=true a.policy=none ->
d.cpu_checkpointing=true a.policy=none a.offload=true -> a.offload: "none"
activation_checkpointing=[] -> $.activation_checkpointing: in_braces
a=[] d={} -> a: in_braces
c.methd=topk -> c.methd: "method"
c.method=TopK -> c.method: "topk"
c.method=ef21 c.ef21={"momentum":0.9} -> c.method: must_be | c.ef21: not_a_key
c.ratio=0.1 -> c.ratio: the_keys_here_are
c.method=topk c.topk.density="0.01" -> c.topk.density: text
c.method=topk c.topk.density=0 -> c.topk.density: above_0
c.method=topk c.warmup_steps=1.0 -> c.warmup_steps: a_valid_integer
c.method=topk c.warmup_steps=" AUTO " -> c.warmup_steps: remove_the_key_(default_100)
c.method=quantize c.quantize.bits=5 -> c.quantize.bits: 8,_4,_3_or_2
c.method=quantize c.quantize.block=true -> c.quantize.block: 64
c.method=topk c.exchange.overlap=true -> c.exchange.overlap: remove_it
c.method=topk c.error_feedback.momentum=matched -> c.error_feedback.momentum: was_removed
c.rules=[{"match":"*","method":"quantize","quantize":{"rotated":0}}] c.method=topk -> c.rules[0].quantize.rotated: more_bits
c.topk={"density":0.1} -> c.topk: while_c.method_is_"none"
c.method=quantize c.topk={"density":0.1} -> c.topk: "quantize"
c.method=powersgd c.topk={"density":0.1} ->
c.method=dense c.error_feedback.enabled=false -> c.error_feedback: "dense"
c.method=dense c.warmup_steps=100 c.min_numel=0 -> c.warmup_steps: "dense" | c.min_numel: "dense"
c.method=dense c.guard={"action":"warn","error":0.5} c.exchange.autotune=false -> c.guard: "dense" | c.exchange.autotune: "dense"
c.method=dense c.exchange.when=accumulation_boundary ->
c.exchange.when=micro_step c.exchange.levels=2 -> c.exchange.when: "none" | c.exchange.levels: "none"
c.rules=[{"match":"*","method":"topk"}] -> c.rules: "none"
c.method=none c.topk={} c.error_feedback.enabled=null ->
c.method=topk c.warmup_steps=0 c.warmup_bits=4 -> c.warmup_bits: c.warmup_steps_to_100
c.method=topk c.error_feedback={"enabled":false,"dtype":"bf16"} -> c.error_feedback.dtype: enabled_is_false
c.method=quantize c.topk={"density":0.1} c.rules=[{"match":"a","method":"powersgd"}] -> c.topk: "quantize"
c.method=quantize c.rules=[{"match":"a","method":"powersgd","topk":{"density":0.1}}] -> c.rules[0].topk: "powersgd"
c.method=dense c.topk.density=0.5 c.rules=[{"match":"*","method":"topk"}] c.warmup_steps=5 ->
c.method=topk c.rules=[{"match":"auto","method":"none"}] -> c.rules[0].match: not_one_of_them | c.rules[0].method: "dense"
c.method=topk c.rules=[{"match":"*","method":"topk","dims":0,"min_numel":"8"}] -> c.rules[0].dims: 1 | c.rules[0].min_numel: text
c.method=topk c.rules=[{"match":"*"},"*"] -> c.rules[0].method: nothing | c.rules[1]: a_list_of_objects
c.method=topk c.rules=[{"match":"*","method":"topk","topk":{"density":0}}] -> c.rules[0].topk.density: above
c.method=topk c.guard.action=warn -> c.guard.error: a_limit
c.method=topk c.guard={"action":"warn","error":0.2} ->
c.method=topk c.guard.error=0.2 -> c.guard.error: set_c.guard.action_to_"warn"
c.method=topk c.exchange.when=accumulation_boundary managed_gradient_accumulation=false -> $.managed_gradient_accumulation: set_c.exchange.when_to
c.method=topk c.start_step=1 c.warmup_steps=2 -> c.start_step: not_a_key
w.deltas=lossless -> w.deltas: set_w.resident_to_true
w.resident=true w.deltas=4bit -> w.deltas: were_removed
t.enabled=true t.every_n_steps=0 t.path="" -> t.every_n_steps: or_equal_to_1 | t.path: file
ds_ckpt=[] -> $.ds_ckpt: in_braces
ds_ckpt={"compresion":{}} -> $.ds_ckpt.compresion: "compression"
activation_checkpoint={} -> $.activation_checkpoint: "activation_checkpointing"
zero_optimisation={} -> $.zero_optimisation: "zero_optimization"
c.method=dense z.stage="auto" -> z.stage: nothing_fills_in
c.method=dense zero_optimization=null -> z.stage: default_is_0
w.resident=true z.stage=2 -> z.stage: w.resident_to_false
a.policy=block c.method=dense w.resident=true z.stage=2 -> z.stage: or_set_c.method_to_"none"_and_set_w.resident_to_false
d={} compile.deepcompile=true -> $.compile.deepcompile: a.policy
a.policy=block z.zero_quantized_weights=true z.zero_hpz_partition_size=2 -> z.zero_hpz_partition_size: quantized
"""
# parts that refuse; key; refused values; accepted values
CONFLICTS = """
c z.reduce_scatter false,"false" true,"auto"
c z.zero_quantized_gradients true,1 false,"auto"
cw z.zenflow {},{"topk_ratio":0.1} null
cw z.mics_shard_size 2 null
c z.offload_optimizer.super_offload true false
cw checkpoint.use_node_local_storage true false
c optimizer.type "Muon","MUON" "AdamW","auto"
cwa compile.deepcompile true false
cw expert_parallel.enabled true false
c gradient_predivide_factor 2.0,0.5 1.0,1
c prescale_gradients true false
c gradient_allreduce_op "SUM" "mean"
w z.offload_param.device "cpu","nvme" "none"
w z.offload_optimizer.device "nvme" "cpu"
w z.cpu_offload_param true false
w z.zero_quantized_weights true false
w z.zero_quantized_nontrainable_weights true false
a hybrid_engine.enabled true false
"""
_PARTS = {"a": "a.policy=block", "c": "c.method=topk", "w": "w.resident=true"}


def full(path: str) -> str:
    """The JSON path of a short one."""
    first, dot, rest = path.partition(".")
    path = f"{_SECTIONS.get(first, first)}{dot}{rest}"
    return path if path.startswith("$") else f"$.{path}"


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def config_of(keys: str) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    for written in keys.replace(" AUTO ", "\0").split():
        path, _, value = written.replace("\0", " AUTO ").partition("=")
        node = config
        *parents, last = full(path).removeprefix("$.").split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value_of(value)
    return config


def problems(config: Any) -> dict[str, str]:
    """Text of each problem by JSON path."""
    try:
        parse(config)
    except ConfigError as error:
        return {p.where: str(p) for p in error.problems}
    return {}


def short(text: str) -> str:
    """The text in the table's notation."""
    for letter, section in _SECTIONS.items():
        text = text.replace(f"$.{section}.", f"{letter}.")
    return text.replace(" ", "_")


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_problems_by_path(row: str) -> None:
    keys, _, reported = row.partition("->")
    expected = dict(one.strip().split(": ") for one in reported.split(" | ") if one.strip())
    found = problems(config_of(keys))
    assert found.keys() == {full(path) for path in expected}
    for path, word in expected.items():
        assert word in short(found[full(path)])


@pytest.mark.parametrize("row", CONFLICTS.strip().splitlines())
def test_unsupported_settings_of_deepspeed(row: str) -> None:
    refusing, key, bad, good = row.split()
    for part, on in _PARTS.items():
        for value in json.loads(f"[{bad}]"):
            found = problems(config_of(f"{on} {key}={json.dumps(value)}".replace(": ", ":")))
            assert list(found) == ([full(key)] if part in refusing else []), (part, value)
        for value in json.loads(f"[{good}]"):
            assert not problems(config_of(f"{on} {key}={json.dumps(value)}"))
    every = " ".join(_PARTS[part] for part in refusing)
    bad = json.dumps(json.loads(f"[{bad}]")[0]).replace(": ", ":")
    (text,) = problems(config_of(f"{every} {key}={bad}")).values()
    assert text.count("set $.ds_ckpt.") == len(refusing), "one problem, with every remedy"
    assert not problems(config_of(f"{key}={bad}")), "without the plugin the key is DeepSpeed's"


def test_keys_of_deepspeed_pass() -> None:
    keys = ("checkpoint", "compile", "pipeline", "compression", "telemetry")
    assert problems({key: {} for key in keys}) == {}


def test_a_number_as_a_key_is_a_wrong_key() -> None:
    """Configurations from Python may have one."""
    (text,) = problems({"ds_ckpt": {"activation": {1: 2}}}).values()
    assert '"1" is not a key of $.ds_ckpt.activation' in text


def test_mistakes_are_reported_together() -> None:
    config = config_of(
        "a.policy=blok a.share_gather=1 c.method=topk c.topk.density=3 c.typo=null "
        "t.every_n_steps=0 activation_checkpointing=3"
    )
    with pytest.raises(ConfigError) as caught:
        parse(config, source="my.json")
    paths = (
        "a.policy a.share_gather c.topk.density c.typo t.every_n_steps $.activation_checkpointing"
    )
    assert {p.where for p in caught.value.problems} == {full(path) for path in paths.split()}
    assert str(caught.value).startswith("my.json cannot be used: 6 problems")
