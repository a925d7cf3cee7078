"""Rules across sections: conflicts with DeepSpeed's settings, dead settings, misplaced sections."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ds_ckpt.config import parse
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.errors import ConfigError

COMPRESSING = ({"method": "dense"}, {"method": "topk"})

# path, a value that cannot be served, a value that can
COMPRESSION_CONFLICTS: list[tuple[str, Any, Any]] = [
    ("zero_optimization.stage", 2, 3),
    ("zero_optimization.stage", "auto", 3),
    ("zero_optimization.stage", "3", 3),
    ("zero_optimization.stage", True, 3),
    ("zero_optimization.reduce_scatter", False, True),
    ("zero_optimization.reduce_scatter", "false", "auto"),
    ("zero_optimization.zero_quantized_gradients", True, False),
    ("zero_optimization.zero_quantized_gradients", 1, "auto"),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, None),
    ("zero_optimization.zenflow", {}, None),
    ("zero_optimization.mics_shard_size", 2, None),
    ("zero_optimization.offload_optimizer", {"device": "cpu", "super_offload": True}, None),
    ("checkpoint.use_node_local_storage", True, False),
    ("optimizer.type", "Muon", "AdamW"),
    ("optimizer.type", "MUON", "auto"),
    ("compile.deepcompile", True, False),
    ("expert_parallel", {"enabled": True, "autoep_size": 2}, {"enabled": False}),
    ("tensor_parallel.autotp_size", 2, 1),
    ("sequence_parallel_size", 2, 1),
    ("gradient_predivide_factor", 2.0, 1.0),
    ("gradient_predivide_factor", 0.5, 1),
    ("prescale_gradients", True, False),
    ("gradient_allreduce_op", "SUM", "mean"),
]
# where the problem is told, if not at the path that was set
TOLD_AT = {
    "zero_optimization.offload_optimizer": "zero_optimization.offload_optimizer.super_offload",
    "expert_parallel": "expert_parallel.enabled",
}


def with_value(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with `value` at the dotted path."""
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    node = config
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return config


def problems(config: dict[str, Any]) -> dict[str, Any]:
    try:
        parse(config)
    except ConfigError as error:
        return {p.where: p for p in error.problems}
    return {}


@pytest.mark.parametrize("compression", COMPRESSING)
@pytest.mark.parametrize(("path", "bad", "good"), COMPRESSION_CONFLICTS)
def test_compression_refuses_what_it_cannot_serve(
    path: str, bad: Any, good: Any, compression: dict[str, Any]
) -> None:
    base = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": compression}}
    found = problems(with_value(base, path, bad))
    where = f"$.{TOLD_AT.get(path, path)}"
    assert list(found) == [where]
    assert '"none"' in found[where].remedy
    assert problems(with_value(base, path, good)) == {}


@pytest.mark.parametrize(("path", "bad", "good"), COMPRESSION_CONFLICTS)
def test_without_the_plugin_deepspeeds_settings_are_its_own(path: str, bad: Any, good: Any) -> None:
    base = {"zero_optimization": {"stage": 3}}
    assert problems(with_value(base, path, bad)) == {}


def test_a_missing_stage_is_deepspeeds_default() -> None:
    for config in ({}, {"zero_optimization": {}}, {"zero_optimization": None}):
        found = problems({**config, "ds_ckpt": {"compression": {"method": "dense"}}})
        assert "default is 0" in found["$.zero_optimization.stage"].found


@pytest.mark.parametrize("section", [True, [], 3])
def test_a_zero_section_that_cannot_be_read(section: Any) -> None:
    found = problems({"zero_optimization": section, "ds_ckpt": {"compression": {"method": "topk"}}})
    assert list(found) == ["$.zero_optimization"]


def test_a_misspelt_method_is_held_against_the_rules_too() -> None:
    found = problems({"ds_ckpt": {"compression": {"method": "top_k"}}})
    assert set(found) == {"$.ds_ckpt.compression.method", "$.zero_optimization.stage"}


# path, a value that cannot be served, a value that can
RESIDENT_CONFLICTS: list[tuple[str, Any, Any]] = [
    ("zero_optimization.stage", 2, 3),
    ("zero_optimization.offload_param", {"device": "cpu"}, {"device": "none"}),
    ("zero_optimization.offload_param", {"device": "nvme"}, None),
    ("zero_optimization.offload_optimizer", {"device": "nvme"}, {"device": "cpu"}),
    ("zero_optimization.cpu_offload_param", True, False),
    ("checkpoint", {"use_node_local_storage": True}, {"use_node_local_storage": False}),
    ("zero_optimization.zero_quantized_weights", True, False),
    ("zero_optimization.zenflow", {}, None),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, False),
    ("zero_optimization.mics_shard_size", 2, None),
    ("expert_parallel", {"enabled": True, "autoep_size": 2}, {"enabled": False}),
    ("tensor_parallel.autotp_size", 2, 1),
    ("sequence_parallel_size", 2, 1),
    ("compile.deepcompile", True, False),
]
_BELOW = {
    "zero_optimization.offload_param": "zero_optimization.offload_param.device",
    "zero_optimization.offload_optimizer": "zero_optimization.offload_optimizer.device",
    "expert_parallel": "expert_parallel.enabled",
    "checkpoint": "checkpoint.use_node_local_storage",
}


@pytest.mark.parametrize("beside", [{}, {"compression": {"method": "dense"}}])
@pytest.mark.parametrize(("path", "bad", "good"), RESIDENT_CONFLICTS)
def test_resident_weights_refuse_what_they_cannot_serve(
    path: str, bad: Any, good: Any, beside: dict[str, Any]
) -> None:
    base = {
        "zero_optimization": {"stage": 3},
        "ds_ckpt": {"weights": {"resident": True}, **beside},
    }
    found = problems(with_value(base, path, bad))
    where = f"$.{_BELOW.get(path, path)}"
    assert list(found) == [where]
    assert "resident" in found[where].remedy or beside
    assert problems(with_value(base, path, good)) == {}


@pytest.mark.parametrize("number", [0, 1, 1.0])
def test_residence_is_no_number(number: float) -> None:
    base = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"weights": {"resident": number}}}
    assert list(problems(base)) == ["$.ds_ckpt.weights.resident"]


@pytest.mark.parametrize("deltas", ["3bit", "4bit"])
def test_few_bits_are_no_choice_of_time(deltas: str) -> None:
    base = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"weights": {"resident": "auto"}}}
    assert not problems(base)
    found = problems(with_value(base, "ds_ckpt.weights.deltas", deltas))
    assert list(found) == ["$.ds_ckpt.weights.resident"]
    assert "write true" in found["$.ds_ckpt.weights.resident"].remedy


def test_how_weights_travel_does_nothing_while_none_are_kept() -> None:
    base = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"weights": {"deltas": "lossless"}}}
    found = problems(base)
    assert list(found) == ["$.ds_ckpt.weights.deltas"]
    assert "$.ds_ckpt.weights.resident to true" in found["$.ds_ckpt.weights.deltas"].remedy


BLOCK = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": {"policy": "block"}}}


@pytest.mark.parametrize(
    ("path", "bad"), [("compile.deepcompile", True), ("hybrid_engine.enabled", True)]
)
def test_block_refuses_what_bypasses_module_hooks(path: str, bad: Any) -> None:
    assert list(problems(with_value(BLOCK, path, bad))) == [f"$.{path}"]
    section = {"zero_optimization": {"stage": 3}, "activation_checkpointing": {}}
    assert list(problems(with_value(section, path, bad))) == [f"$.{path}"]


def test_block_refuses_weights_that_recompute_sees_quantized_twice() -> None:
    one = with_value(BLOCK, "zero_optimization.zero_quantized_weights", True)
    assert problems(one) == {}
    other = with_value(BLOCK, "zero_optimization.zero_hpz_partition_size", 2)
    assert problems(other) == {}
    both = with_value(one, "zero_optimization.zero_hpz_partition_size", 2)
    assert list(problems(both)) == ["$.zero_optimization.zero_hpz_partition_size"]


@pytest.mark.parametrize("stage", [0, 1, 2, None])
def test_block_works_at_every_stage_but_shares_gathers_at_three_only(stage: int | None) -> None:
    config = with_value(BLOCK, "zero_optimization.stage", stage)
    assert problems(config) == {}
    sharing = with_value(config, "ds_ckpt.activation.share_gather", False)
    assert list(problems(sharing)) == ["$.ds_ckpt.activation.share_gather"]


def test_a_problem_of_both_halves_is_told_once() -> None:
    config = with_value(BLOCK, "ds_ckpt.compression.method", "dense")
    assert list(problems(with_value(config, "compile.deepcompile", True))) == [
        "$.compile.deepcompile"
    ]


def test_what_two_parts_refuse_names_both_ways_out() -> None:
    config = with_value(BLOCK, "ds_ckpt.compression.method", "dense")
    config = with_value(config, "ds_ckpt.weights.resident", True)
    (problem,) = problems(with_value(config, "zero_optimization.stage", 2)).values()
    assert problem.remedy == (
        'write 3, or set $.ds_ckpt.compression.method to "none" '
        "and set $.ds_ckpt.weights.resident to false"
    )


@pytest.mark.parametrize("method", ["none", "dense", None])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topk", {"density": 0.1}),
        ("quantize", {"bits": 4}),
        ("error_feedback", {"enabled": False}),
        ("warmup_steps", 100),
        ("min_numel", 0),
    ],
)
def test_settings_of_compression_without_it(method: str | None, key: str, value: Any) -> None:
    section = {"compression": {"method": method, key: value}}
    found = problems({"zero_optimization": {"stage": 3}, "ds_ckpt": section})
    assert list(found) == [f"$.ds_ckpt.compression.{key}"]
    assert "does nothing" in found[f"$.ds_ckpt.compression.{key}"].why


@pytest.mark.parametrize(
    ("method", "other", "value"),
    [("topk", "quantize", {"bits": 8}), ("quantize", "topk", {"density": 0.1})],
)
def test_the_section_of_another_method(method: str, other: str, value: dict[str, Any]) -> None:
    base = {"zero_optimization": {"stage": 3}}
    section = {"compression": {"method": method, other: value, "warmup_steps": 3, "min_numel": 0}}
    found = problems({**base, "ds_ckpt": section})
    assert list(found) == [f"$.ds_ckpt.compression.{other}"]
    (problem,) = found.values()
    assert f'does nothing with method "{method}"' in problem.why
    assert f'compression.method to "{other}"' in problem.remedy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("activation.modules", ["Block"]),
        ("activation.share_gather", True),
        ("telemetry.path", "t.jsonl"),
        ("telemetry.every_n_steps", 10),
    ],
)
def test_settings_of_what_is_off(path: str, value: Any) -> None:
    base = {"zero_optimization": {"stage": 3}, "ds_ckpt": {}}
    assert list(problems(with_value(base, f"ds_ckpt.{path}", value))) == [f"$.ds_ckpt.{path}"]
    off = with_value(base, "ds_ckpt.telemetry", {"enabled": False})
    off = with_value(off, "ds_ckpt.activation", {"policy": "none"})
    assert list(problems(with_value(off, f"ds_ckpt.{path}", value))) == [f"$.ds_ckpt.{path}"]


def test_objects_without_settings_are_not_settings() -> None:
    section = {"compression": {"method": "none", "topk": {}, "error_feedback": {"enabled": None}}}
    assert problems({"ds_ckpt": section}) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition_activations", True),
        ("cpu_checkpointing", True),
    ],
)
def test_deepspeeds_keys_that_would_do_nothing(key: str, value: Any) -> None:
    none = {"ds_ckpt": {"activation": {"policy": "none"}}, "activation_checkpointing": {key: value}}
    (problem,) = problems(none).values()
    assert problem.where == f"$.activation_checkpointing.{key}"
    assert "do" in problem.why
    assert "nothing" in problem.why
    assert "remove" in problem.remedy


@pytest.mark.parametrize(
    ("key", "ours", "value"),
    [
        ("partition_activations", "partition", True),
        ("cpu_checkpointing", "offload", True),
    ],
)
def test_deepspeeds_keys_mean_ours(key: str, ours: str, value: Any) -> None:
    section = {key: value}
    config = {"zero_optimization": {"stage": 3}, "activation_checkpointing": section}
    activation = parse(config).activation
    assert activation.policy == "block"
    assert getattr(activation, ours) == value
    same = {**config, "ds_ckpt": {"activation": {ours: value}}}
    assert parse(same).activation == activation
    against = problems({**config, "ds_ckpt": {"activation": {ours: False}}})
    assert f"$.activation_checkpointing.{key}" in against[f"$.ds_ckpt.activation.{ours}"].why


def test_keys_that_need_a_switch() -> None:
    found = problems(
        {"ds_ckpt": {"activation": {"policy": "block", "offload_prefetch": 2}}},
    )
    assert "$.ds_ckpt.activation.offload" in found["$.ds_ckpt.activation.offload_prefetch"].why
    # gathers of split boundaries come ahead by the same number
    split = {"policy": "block", "partition": True, "offload_prefetch": 2}
    zero3 = {"zero_optimization": {"stage": 3}}
    assert parse({**zero3, "ds_ckpt": {"activation": split}}).activation.offload_prefetch == 2
    found = problems({"ds_ckpt": {"activation": {"policy": "block", "partition_min_bytes": 0}}})
    assert "$.ds_ckpt.activation.partition" in found["$.ds_ckpt.activation.partition_min_bytes"].why


@pytest.mark.parametrize(
    ("section", "key"),
    [
        *(("ds_ckpt.activation", k) for k in ("contiguous", "synchronize", "profile")),
        ("activation_checkpointing", "contiguous_memory_optimization"),
        ("activation_checkpointing", "synchronize_checkpoint_boundary"),
        ("activation_checkpointing", "profile"),
    ],
)
def test_removed_ways_to_keep_inputs_are_refused_in_words(section: str, key: str) -> None:
    config = with_value({"zero_optimization": {"stage": 3}}, f"{section}.{key}", True)
    (problem,) = problems(config).values()
    assert problem.where == f"$.{section}.{key}"
    assert "removed" in problem.why
    off = {"activation_checkpointing": {key: False}}
    assert section == "ds_ckpt.activation" or problems(off) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("cpu_checkpointing", value) for value in ("auto", 0, "no", 3)],
)
def test_deepspeeds_keys_are_strict_too(key: str, value: Any) -> None:
    """And a mistake is told once, where it stands."""
    found = problems({"activation_checkpointing": {key: value}})
    assert list(found) == [f"$.activation_checkpointing.{key}"]
    assert "write for example true" in found[f"$.activation_checkpointing.{key}"].remedy


def test_the_key_that_deepspeeds_documentation_invents() -> None:
    found = problems({"activation_checkpointing": {"partitioned_activations": False}})
    problem = found["$.activation_checkpointing.partitioned_activations"]
    assert "documentation" in problem.why
    assert '"partition_activations"' in problem.why


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("ds-ckpt", "ds_ckpt"),
        ("ds_chkpt", "ds_ckpt"),
        ("dsckpt", "ds_ckpt"),
        ("DS_CKPT", "ds_ckpt"),
        ("ds_checkpoint", "ds_ckpt"),
        ("activation_checkpoint", "activation_checkpointing"),
        ("activation_checkpoints", "activation_checkpointing"),
        ("activation-checkpointing", "activation_checkpointing"),
        ("activations_checkpointing", "activation_checkpointing"),
        ("gradient_checkpointing", "activation_checkpointing"),
    ],
)
def test_near_misses_of_our_sections(key: str, meant: str) -> None:
    found = problems({key: {}})
    assert len(found) == 1
    (problem,) = found.values()
    assert f'did you mean "{meant}"?' in problem.why
    assert problem.where in (f"$.{key}", f"$['{key}']")


# DeepSpeed's own top-level keys, and some of HF's and accelerate's
NOT_OURS = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
optimizer scheduler fp16 bf16 amp torch_autocast gradient_clipping zero_optimization
checkpoint data_types steps_per_print wall_clock_breakdown dump_state comms_logger
tensorboard wandb csv_monitor comet flops_profiler autotuning aio data_efficiency
compile tensor_parallel expert_parallel hybrid_engine pipeline timers
checkpoint_engine weight_quantization msamp zero_allow_untested_optimizer
communication_data_type prescale_gradients curriculum_learning
sequence_parallel_size dataloader_drop_last activation compression telemetry"""


@pytest.mark.parametrize("key", NOT_OURS.split())
def test_other_top_level_keys_pass(key: str) -> None:
    assert problems({key: {"enabled": False}}) == {}


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"compression": {"method": "topk"}}, "$.compression"),
        ({"activation": {"policy": "block"}}, "$.activation"),
        ({"telemetry": {"every_n_steps": 1}}, "$.telemetry"),
        ({"zero_optimization": {"ds_ckpt": {}}}, "$.zero_optimization.ds_ckpt"),
        (
            {"zero_optimization": {"activation_checkpointing": {}}},
            "$.zero_optimization.activation_checkpointing",
        ),
    ],
)
def test_sections_in_the_wrong_place(config: dict[str, Any], where: str) -> None:
    found = problems(config)
    assert list(found) == [where]
    assert found[where].remedy.startswith("move it to $.")


def test_micro_steps_cannot_be_held_back_where_nobody_knows_the_last() -> None:
    compression: dict[str, Any] = {
        "method": "topk",
        "exchange": {"when": "accumulation_boundary"},
    }
    config = {
        "zero_optimization": {"stage": 3},
        "managed_gradient_accumulation": False,
        "ds_ckpt": {"compression": compression},
    }
    with pytest.raises(ConfigError, match="managed_gradient_accumulation") as error:
        parse(config)
    assert [p.where for p in error.value.problems] == ["$.ds_ckpt.compression.exchange.when"]
    for when in ("micro_step", "auto"):
        compression["exchange"]["when"] = when
        assert parse(config).compression.exchange.when == when


@pytest.mark.parametrize(
    ("section", "by_itself"),
    [
        ({"method": "topk"}, True),
        ({"method": "dense"}, False),
        ({"method": "quantize", "error_feedback": {"enabled": False}}, False),
        ({"method": "dense", "rules": [{"match": "*", "method": "topk"}]}, True),
    ],
)
def test_micro_steps_wait_by_themselves_where_there_are_residuals(
    section: dict[str, Any], by_itself: bool
) -> None:
    for when, expected in (
        (None, by_itself),
        ("auto", by_itself),
        ("micro_step", False),
        ("accumulation_boundary", True),
    ):
        compression = section | ({} if when is None else {"exchange": {"when": when}})
        parsed = parse({"zero_optimization": {"stage": 3}, "ds_ckpt": {"compression": compression}})
        given = exchange_settings(parsed.compression)
        assert given.holds_back(8) == expected
        assert not given.holds_back(1)
