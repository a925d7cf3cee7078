"""Compression on real ZeRO-3 engines, in any precision, over two levels too: laws 1, 3, 4 and 5."""

import contextlib
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.runtime.zero import stage3

import ds_ckpt
from ds_ckpt.patch import Patches
from ds_ckpt.zero3 import compatibility
from ds_ckpt.zero3.parameters import shapes_of
from tests.distributed import models, training
from tests.distributed.models import quantize_section, topk_section
from tests.distributed.pool import fresh, hosts, ranks
from tests.distributed.training import captured_log, convert, of_all_ranks, running, trained, unsent

SLOW = pytest.mark.slow
TOPK = topk_section(topk={"density": 0.05})
# Hysteresis: the first overflow leaves the scale, so that a run without it computes the same.
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "one micro-step": {"accumulation": 1},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": FP16, "clip": 0.5},
    "fp16, offloaded": {"fp16": FP16, "offload_param": True, "offload_optimizer": True},
    "parameters offloaded": {"offload_param": True, "offload_optimizer": True, "clip": 0.5},
}


def low_rank(**compression: Any) -> dict[str, Any]:
    return topk_section(method="powersgd", powersgd={"rank": 2}, **compression)


def _rule(match: str, method: str, **settings: Any) -> dict[str, Any]:
    return {"match": match, "method": method, **({method: settings} if settings else {})}


def by_rules(metric: str) -> dict[str, Any]:
    return low_rank(
        rules=[
            _rule("*embed*", "topk", density=0.05),
            _rule("*.mlp.up*", "entropy_coded", metric=metric),
            _rule("lm_head*", "quantize"),
        ]
    )


SECTIONS = {
    "topk": TOPK,
    "topk fp32": topk_section(topk={"density": 0.05, "values": "fp32"}),
    "topk bf16": topk_section(topk={"density": 0.05}, error_feedback={"dtype": "bf16"}),
    "each micro-step": topk_section(topk={"density": 0.05}, exchange={"when": "micro_step"}),
    "at the boundary": topk_section(
        topk={"density": 0.05}, exchange={"when": "accumulation_boundary"}
    ),
    "2 bits": quantize_section(quantize={"bits": 2, "block": 32}),
    "3 bits": quantize_section(quantize={"bits": 3}),
    "4 bits": quantize_section(),
    "1 bit after 4 bits": topk_section(method="entropy_coded", warmup_steps=4, warmup_bits=4),
    "powersgd": low_rank(),
    "powersgd bf16": low_rank(error_feedback={"dtype": "bf16"}),
    "powersgd int8 on host": low_rank(error_feedback={"dtype": "int8", "device": "cpu"}),
    "powersgd and 4 bits": low_rank(rules=[_rule("*.mlp.*", "quantize")]),
    "by rules": by_rules("steps"),
    # the metric of steps is not saved, so a run that uses it does not resume to the bit
    "by rules, energy": by_rules("energy"),
    # every method in one model, residuals rounded and on the host
    "everything": low_rank(
        rules=[
            _rule("*embed*", "topk", density=0.1),
            _rule("*down_proj*", "quantize", bits=2),
            _rule("*o_proj*", "entropy_coded", metric="energy"),
        ],
        error_feedback={"dtype": "int8", "device": "cpu"},
    ),
}


@pytest.mark.parametrize(
    ("slots", "kind", "options"),
    [
        ([2], "llama", {"clip": 0.1}),
        ([2], "plain", {"offload_optimizer": True, "accumulation": 2}),
        ([4], "plain", {"accumulation": 2}),
        ([2, 2], "llama", {}),
        pytest.param([2], "llama", {"bucket": 500_000_000, "clip": 1.0}, marks=SLOW),
        pytest.param([4], "llama", {"offload_optimizer": True}, marks=SLOW),
    ],
    ids=str,
)
@ranks()
def test_an_exchange_that_sends_everything_equals_deepspeed(kind, options) -> None:
    expected, ours = (training.trained(kind, one, 6, **options) for one in ({}, training.DENSE))
    assert not expected.active
    assert ours.active
    assert ours.collectives > 0
    if dist.get_world_size() == 2:  # a sum of two has one order
        assert ours.losses == expected.losses
        assert ours.weights == expected.weights
    else:  # gloo's ring adds up in another order: a few units of fp32 a step
        assert ours.losses == pytest.approx(expected.losses, abs=1e-4)


@ranks(2)
def test_warm_up_is_plain_deepspeed() -> None:
    warm, longer = (training.trained("llama", topk_section(warmup_steps=4), n) for n in (4, 5))
    assert warm.weights == training.trained("llama", {}, 4).weights
    assert not warm.residuals
    assert longer.residuals


@pytest.mark.parametrize(
    ("slots", "section", "kind", "accumulation"),
    [
        ([2, 2], "powersgd and 4 bits", "llama", 2),
        ([4], "4 bits", "plain", 1),
        pytest.param([4], "topk fp32", "llama", 1, marks=SLOW),
        ([2], "2 bits", "plain", 1),
        ([2], "1 bit after 4 bits", "llama", 1),
        ([2], "each micro-step", "plain", 4),
        ([2], "at the boundary", "llama", 4),
        ([2], "powersgd", "llama", 1),
        ([2], "by rules", "llama", 1),
        ([4], "powersgd", "llama", 1),
        pytest.param([2, 2], "topk", "llama", 2, marks=SLOW),
        pytest.param([2, 2], "powersgd", "llama", 1, marks=SLOW),
    ],
)
@pytest.mark.sampled(6)
@ranks()
def test_nothing_is_lost(slots: list[int], section: str, kind: str, accumulation: int) -> None:
    settings = SECTIONS[section]
    steps = max(4, settings["compression"]["warmup_steps"] + 2)
    worst, count = training.conservation(kind, settings, steps, accumulation, levels=len(slots))
    assert count > 3
    is_low_rank = settings["compression"]["method"] == "powersgd"
    assert worst < (3e-5 if is_low_rank or len(slots) > 1 else 1e-5)


@pytest.mark.parametrize(
    ("slots", "section", "options", "value", "where"),
    [
        ([2], "each micro-step", "fp32", "inf", (0, 0, "layers.1.mlp.down_proj")),
        ([2], "at the boundary", "fp32", "nan", (1, 1, "layers.0.input_layernorm")),
        pytest.param([2], "topk", "one micro-step", "nan", (1, 0, "norm"), marks=SLOW),
        ([2], "powersgd", "fp32", "inf", (1, 1, "layers.1.mlp.down_proj")),
        ([2], "by rules", "fp32", "inf", (1, 1, "layers.1.mlp.down_proj")),
        ([2], "topk", "bf16", "inf", (1, 1, "layers.1.mlp.down_proj")),
        ([2], "3 bits", "fp16", "nan", (1, 1, "layers.1.mlp.down_proj")),
        ([2], "everything", "fp16, offloaded", "inf", (1, 1, "layers.1.mlp.down_proj")),
        ([2], "3 bits", "parameters offloaded", "inf", (1, 1, "layers.1.mlp.down_proj")),
        pytest.param(
            *([2, 2], "everything", "fp16", "nan", (3, 1, "layers.1.mlp.down_proj")), marks=SLOW
        ),
    ],
)
@pytest.mark.sampled(4)
@ranks()
def test_non_finite_passes_through(section, options, value, where) -> None:
    victim, micro, name = where
    where = (victim, micro, f"model.{name}.weight")
    with training.fp16_on_cpu():
        training.check_non_finite(
            SECTIONS[section], float(value), where, **{"accumulation": 2, **OPTIONS[options]}
        )


@pytest.mark.parametrize(
    ("slots", "section", "options"),
    [
        ([2], "topk", "one micro-step"),
        ([2], "topk bf16", "one micro-step"),
        ([2], "powersgd int8 on host", "one micro-step"),
        ([2], "everything", "bf16"),
        *(
            pytest.param(*row, marks=SLOW)
            for row in (
                ([2], "1 bit after 4 bits", "one micro-step"),
                ([2], "powersgd bf16", "one micro-step"),
                ([2], "by rules, energy", "one micro-step"),
                ([2], "everything", "fp16, offloaded"),
                ([2, 2], "everything", "parameters offloaded"),
            )
        ),
    ],
)
@ranks()
def test_resume_on_the_same_world_is_bit_exact(tmp_path: Path, section: str, options: str) -> None:
    given = {"accumulation": 2, **OPTIONS[options]}
    with training.fp16_on_cpu():
        found = training.check_resume(tmp_path, SECTIONS[section], **given)
    is_low_rank = SECTIONS[section]["compression"]["method"] == "powersgd"
    assert (found["factors"] > 3) == is_low_rank
    assert len(list(tmp_path.rglob("ds_ckpt_residuals*"))) == dist.get_world_size()


@pytest.mark.parametrize(
    "section",
    [
        {**TOPK, "activation": {"policy": "block"}},
        {"telemetry": {"enabled": True}},
        topk_section(topk={"density": 0.05}, error_feedback={"momentum": 0.4}),
    ],
)
@ranks(2)
def test_detach_leaves_deepspeed_as_it_was_found(section: dict[str, Any]) -> None:
    with training.running("llama") as engine:
        engine._config._param_dict["ds_ckpt"] = section
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        things = [engine, engine.optimizer, coordinator, comm.cdb, *engine.module.modules()]
        before = [dict(vars(thing)) for thing in things]
        globals_before = (stage3.reduce_scatter_coalesced, deepspeed.initialize)

        def differences() -> list[str]:
            return [
                key
                for thing, old in zip(things, before, strict=True)
                for key in {*old, *vars(thing)}
                if key not in old or key not in vars(thing) or vars(thing)[key] is not old[key]
            ]

        places: list[tuple[int, str]] = []
        put = Patches.set

        def recorded(patches: Patches, target: Any, name: str, value: Any) -> None:
            places.append((id(target), name))
            put(patches, target, name, value)

        with patch.object(Patches, "set", recorded):
            session = ds_ckpt.attach(engine)
        assert differences()
        assert len(places) == len(set(places)), "each in one place"
        session.detach()
        assert differences() == []
        assert globals_before == (stage3.reduce_scatter_coalesced, deepspeed.initialize)
        assert ds_ckpt.session_of(engine) is None
        losses = models.train(engine, "llama", 3)
    assert losses == training.trained("llama", {}, 3).losses


def _held(engine: Any) -> float:
    """The sum of the magnitudes of this rank's residuals."""
    return sum(float(r.abs().sum()) for r in ds_ckpt.session_of(engine).residuals.values())


@ranks(2)
def test_a_save_without_residuals_removes_earlier_ones_and_a_load_starts_clean(tmp_path) -> None:
    for section in (TOPK, training.DENSE):
        with training.running("llama", section) as engine:
            models.train(engine, "llama", 2)
            engine.save_checkpoint(str(tmp_path), "mine")
    assert list(tmp_path.rglob("ds_ckpt_residuals*")) == []
    with training.running("llama", TOPK) as engine:
        models.train(engine, "llama", 1)
        assert _held(engine) > 0
        engine.load_checkpoint(str(tmp_path))
        assert _held(engine) == 0


@pytest.mark.parametrize("broken", [(), (0, 1), (1,)], ids=str)
@ranks(2, timeout=60)
def test_a_changed_source_is_compared_with_the_live_reduction(broken: tuple[int, ...]) -> None:
    """One rank's finding ends all of them, and nobody waits for it in a collective."""
    original, symbol = stage3.reduce_scatter_coalesced, compatibility.SYMBOLS[0]
    changed = compatibility.SymbolFinding(symbol.path, "digest_changed", "source changed", "")

    def summed(tensors: Any, group: Any = None) -> Any:  # where the mean was meant
        return [part * dist.get_world_size(group) for part in original(tensors, group)]

    expected = training.refused(kind=ds_ckpt.ContractError) if broken else contextlib.nullcontext()
    is_broken = dist.get_rank() in broken
    with patch.object(compatibility, "require", lambda symbols=None: [changed]):
        with patch.object(stage3, "reduce_scatter_coalesced", summed if is_broken else original):
            with expected as error, training.running("llama", TOPK) as engine:
                models.train(engine, "llama", 2)
    if is_broken:
        assert "reduce_scatter_coalesced, parameter" in str(error.value)
        assert "another result" in str(error.value)
    elif broken:
        assert "on other ranks" in str(error.value)


@ranks(2)
def test_residuals_follow_the_optimizers_state(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with training.running("llama", TOPK) as engine:
        models.train(engine, "llama", 3)
        engine.save_checkpoint(folder, "mine")
        saved = _held(engine)
    assert saved > 0
    for arguments, options, expected in (
        ((folder,), {}, saved),
        ((folder, "mine"), {}, saved),
        ((folder,), {"load_module_only": True}, 0),
        ((folder,), {"load_optimizer_states": False}, 0),
        ((f"{folder}/nothing there",), {}, None),
    ):
        with training.running("llama", TOPK) as engine:
            models.train(engine, "llama", 1)
            before = _held(engine)
            assert before > 0
            engine.load_checkpoint(*arguments, **options)
            assert _held(engine) == (before if expected is None else expected)


@ranks(2)
def test_residuals_are_free_of_autocasts_scale() -> None:
    """A second step reads the scaler's scale once: a GPU's host waits for each reading."""
    largest = []
    for sections in ({}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}):
        with training.running("llama", TOPK, **sections) as engine:
            models.train(engine, "llama", 1)
            residuals = ds_ckpt.session_of(engine).residuals
            largest.append(max(float(r.abs().max()) for r in residuals.values()))
            scaler = engine.optimizer.torch_autocast_gradscaler
            if sections:
                assert scaler.get_scale() > 1000
                with patch.object(scaler, "get_scale", wraps=scaler.get_scale) as asked:
                    models.train(engine, "llama", 1, first=1)
                assert asked.call_count == 1
    assert largest[1] < 3 * largest[0]


@SLOW
@ranks(2)
def test_one_exchange_an_accumulated_step() -> None:
    baseline, each, once = (
        training.trained("llama", section, 3, accumulation=4)
        for section in ({}, SECTIONS["each micro-step"], SECTIONS["at the boundary"])
    )
    assert each.collectives == 4 * once.collectives
    assert each.sent == pytest.approx(4 * once.sent, rel=0.02)
    assert baseline.losses[:4] == once.losses[:4]
    assert 0 < training.largest_gap(baseline.losses, once.losses) < 0.1


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.sampled(1)
@ranks(2)
def test_gradients_that_the_program_drops_leave_nothing(accumulation: int) -> None:
    """Backward, then `zero_grad` instead of a step."""

    def drop(engine: Any) -> None:
        data = models.batch("llama", 77, dist.get_rank())
        loss = models.loss_of(engine(**data))
        engine.backward(loss * float("nan"))
        engine.optimizer.zero_grad()

    training.check_no_trace(drop, 2, SECTIONS["4 bits"], accumulation=accumulation)


def _entries_held(section: dict[str, Any]) -> tuple[int, int, str]:
    """Entries of residuals that this process holds, those of their parameters, and the summary."""
    with training.running("llama", section) as engine:
        session = ds_ckpt.session_of(engine)
        models.train(engine, "llama", 2)
        held = sum(r.numel() for r in session.residuals.values())
        whole = sum(s.numel() for n, s, _ in shapes_of(engine) if n in session.residuals)
        return held, whole, session.summary


@pytest.mark.parametrize(
    ("slots", "share", "between"),
    [([2, 2], 0.5, "nodes"), ([4], 1.0, "ranks"), ([1, 3], 1.0, "ranks")],
    ids=str,
)
@ranks()
def test_residuals_are_divided_by_the_ranks_of_a_node(share: float, between: str) -> None:
    held, whole, summary = _entries_held(SECTIONS["4 bits"])
    assert held == pytest.approx(share * whole, rel=0.02 if share < 1 else 0)
    assert f"gradient bytes between {between}" in summary
    wide = topk_section(method="powersgd", powersgd={"rank": 1000})
    assert "nothing is saved" in _entries_held(wide)[2]


@pytest.mark.parametrize(
    ("start", "end"), [([2, 2], [4]), ([4], [2, 2]), ([2, 2], [2, 2])], ids=str
)
@ranks(4)
def test_a_checkpoint_with_two_levels_keeps_residuals_on_the_same_nodes_alone(
    tmp_path: Path, start: list[int], end: list[int]
) -> None:
    with hosts(start), training.running("llama", SECTIONS["powersgd and 4 bits"]) as engine:
        models.train(engine, "llama", 3)
        engine.save_checkpoint(str(tmp_path))
        saved = training.unsent(engine)
        assert any(total.any() for total in saved.values())
    with hosts(end), training.running("llama", SECTIONS["powersgd and 4 bits"]) as engine:
        engine.load_checkpoint(str(tmp_path))
        loaded = training.unsent(engine)
        assert loaded.keys() == (saved.keys() if start == end else set())
        for name, total in loaded.items():
            assert torch.allclose(saved[name], total, rtol=1e-6, atol=1e-9)
        assert all(loss == loss for loss in models.train(engine, "llama", 2, first=10))


OWN = 0.9


def section_of(momentum: Any = 0.4, **compression: Any) -> dict[str, Any]:
    feedback = {"momentum": momentum}
    return topk_section(topk={"density": 0.05}, error_feedback=feedback, **compression)


def _start(section: dict[str, Any], optimizer: Any, **options: Any) -> Any:
    """An engine with an optimizer of ours, matrices and the rest in groups of their own."""
    fresh()
    config = models.zero3_config(ds_ckpt=section, **options)
    del config["optimizer"]
    model = models.build("llama")
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) == large] for large in (True, False)
    )
    engine, *_ = ds_ckpt.initialize(
        model=model,
        optimizer=optimizer([{"params": matrices}, {"params": vectors}], lr=1e-3),
        config=config,
    )
    engine.train()
    return engine


@pytest.mark.parametrize(
    "options",
    [{"accumulation": 2}, {"offload_optimizer": True, "clip": 0.1}, {"bf16": {"enabled": True}}],
    ids=["accumulation", "offload", "bf16"],
)
@pytest.mark.sampled(2)
@ranks(2)
def test_the_first_moment_is_corrected_from_the_warm_ups_end(options: dict[str, Any]) -> None:
    engine = _start(section_of(warmup_steps=2), torch.optim.AdamW, **options)
    optimizer, groups = engine.optimizer.optimizer, engine.optimizer.param_groups
    seen: list[list[tuple[int, float]]] = []
    step, own = optimizer.step, [group["betas"] for group in groups]

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = [(i, g["betas"][0]) for i, g in enumerate(optimizer.param_groups) if g["params"]]
        seen[-1] += found
        return step(*args, **kwargs)

    optimizer.step = watched
    for number in range(4):
        seen.append([])
        models.train(engine, "llama", 1, first=number)
        assert all(g["betas"] is b for g, b in zip(groups, own, strict=True))
    for betas in seen[:2]:
        assert all(b1 == OWN for _, b1 in betas)
    for betas in seen[2:]:
        assert {group for group, _ in betas} == {0, 1}
        assert all(b1 < OWN if group == 0 else b1 == OWN for group, b1 in betas)  # norms: dense
    summary = ds_ckpt.session_of(engine).summary
    assert "momentum correction 0.4" in summary
    one, other = of_all_ranks((seen, summary))
    assert one == other
    engine.destroy()


@ranks(2)
def test_it_is_off_by_default() -> None:
    off, on = (trained("llama", section_of(how), 3) for how in ("none", 0.4))
    plain = trained("llama", topk_section(topk={"density": 0.05}), 3)
    assert off.losses == plain.losses
    assert off.weights == plain.weights
    assert on.losses[:1] == off.losses[:1]
    assert on.losses != off.losses


@ranks(2)
def test_another_optimizer_is_not_corrected() -> None:
    engine = _start(section_of(), torch.optim.SGD)
    models.train(engine, "llama", 2)
    summary = ds_ckpt.session_of(engine).summary
    assert "SGD is not" in summary.partition("no momentum correction: ")[2]
    engine.destroy()


def _save_universal(folder: Path) -> dict[str, Any]:
    with running("llama", SECTIONS["powersgd bf16"]) as engine:
        models.train(engine, "llama", 3)
        engine.save_checkpoint(str(folder))
        return {"weights": models.weights_digest(engine), "unsent": unsent(engine)}


def _load_universal(folder: Path, *, holds_residuals: bool, again: str = "") -> dict[str, Any]:
    """Load a universal checkpoint, save it as it was loaded if `again` names a folder, train on."""
    with running("llama", SECTIONS["powersgd bf16"], checkpoint={"load_universal": True}) as engine:
        with captured_log() as logged:
            models.train(engine, "llama", 1)  # leaves residuals, which the load must not keep
            engine.load_checkpoint(str(folder))
        if again:
            engine.save_checkpoint(again)
        warnings = sum("holds no residuals; they start at 0" in line for line in logged)
        assert warnings == (not holds_residuals)
        assert engine.global_steps == 3
        found = {"weights": models.weights_digest(engine), "unsent": unsent(engine)}
        assert all(loss == loss for loss in models.train(engine, "llama", 3, first=3))
        assert len(ds_ckpt.session_of(engine).residuals) > 3
    return found


@pytest.mark.slow
def test_universal_checkpoints_work_with_compression_on(world2, world4, tmp_path) -> None:
    """They are DeepSpeed's way to another world; residuals come along, without a hand copy."""
    four = tmp_path / "on four"
    saved = world2.run(_save_universal, tmp_path)
    universal = convert(tmp_path, "global_step3")
    shutil.rmtree(tmp_path / "global_step3")
    more = world4.run(_load_universal, tmp_path, holds_residuals=True, again=str(four))
    convert(four, "global_step3")
    fewer = world2.run(_load_universal, four, holds_residuals=True)
    for path in universal.glob("ds_ckpt_residuals_*"):
        path.unlink()
    without = world2.run(_load_universal, tmp_path, holds_residuals=False)
    assert all(process["unsent"] == {} for process in without)
    assert [p["weights"] for p in without] == [p["weights"] for p in saved]
    for process in (*more, *fewer):
        assert process["unsent"].keys() == saved[0]["unsent"].keys()
        for name, total in saved[0]["unsent"].items():
            assert total.abs().max() > 0
            gap = (process["unsent"][name] - total).abs().max()
            assert gap <= 1e-6 * total.abs().max()
