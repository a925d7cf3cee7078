"""Compression and resident weights beside tensor and sequence parallelism, on two by two ranks.

Law 9: parameters that tensor-parallel ranks replicate stay equal to the bit.
"""

import functools
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import groups, safe_get_local_grad

import ds_ckpt
from ds_ckpt.engine import tuner as tuning
from tests.distributed import models, tensor_parallel
from tests.distributed.models import topk_section
from tests.distributed.pool import fresh, hosts, once, ranks
from tests.distributed.test_ecosystem import installed
from tests.distributed.training import DENSE, convert, refused

SIZE = 2
ULYSSES = ("sp", "mesh", "accelerate")
METHODS = {
    "topk": topk_section(topk={"density": 0.05}),
    "quantize": topk_section(method="quantize", quantize={"bits": 3}),
    "powersgd": topk_section(method="powersgd", powersgd={"rank": 2}),
    "entropy_coded": topk_section(
        method="entropy_coded", entropy_coded={"bits": 1.0, "metric": "steps"}
    ),
}
RESIDENT = {"weights": {"resident": True}}


def slow(*rows: str) -> list[Any]:
    return [pytest.param(row, marks=pytest.mark.slow) for row in rows]


class _MeanOfTokens(torch.autograd.Function):
    """The mean loss over a sequence's ranks. Each calls backward, and ZeRO-3 takes the mean of all.

    Backward of torch's differentiable all-gather takes ranks of a group for those of the world.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, count: torch.Tensor, group: Any) -> torch.Tensor:
        both = torch.stack([own.detach() * count, count.float()])
        dist.all_reduce(both, group=group)
        ctx.weight = dist.get_world_size(group) * count / both[1]
        return both[0] / both[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.weight, None, None


def _sequence_parallel(model: Any) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", sequence_parallel_size=SIZE, micro_batch_size=2
    )


def _accelerated(model: Any, config: dict[str, Any]) -> Any:
    """The engine of `Accelerator.prepare`, which also cuts batches."""
    from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig, DummyOptim

    sizes = {"sp_size": SIZE, "dp_shard_size": dist.get_world_size() // SIZE}
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(**sizes, sp_handler=handler),
    )
    engine, _ = accelerator.prepare(model, DummyOptim(model.parameters()))
    engine.cut = accelerator.deepspeed_ulysses_dl_adapter
    return engine


@contextmanager
def engine_of(kind: str, sections: dict[str, Any], **options: Any) -> Iterator[Any]:
    """An engine of two by two ranks.

    Args:
        kind: "tp" (AutoTP), "init" (of a model made in zero.Init), "megatron" (an mpu), "sp"
            (Ulysses, with the mpu that it returns), "mesh" (Ulysses, with JSON keys alone, from
            which DeepSpeed makes a device mesh) or "accelerate" (its `ParallelismConfig`).
    """
    fresh()
    config = models.zero3_config(**{"clip": 1.0, **options}, **sections)
    arguments: dict[str, Any] = {}
    with (
        tensor_parallel.ulysses_forgotten(),
        tensor_parallel.auto_tp(SIZE) if kind in ("tp", "init") else nullcontext(),
        installed() if kind == "accelerate" else nullcontext(),
    ):
        if kind in ("tp", "init"):
            config["tensor_parallel"] = {"autotp_size": SIZE}
        if kind in ("sp", "mesh"):
            config["sequence_parallel_size"] = SIZE
        if kind == "mesh":
            config["data_parallel_size"] = dist.get_world_size() // SIZE
        if kind == "megatron":
            arguments["mpu"] = mpu = tensor_parallel.MegatronMpu(
                tensor_parallel.neighbours(SIZE), tensor_parallel.across(SIZE)
            )
            model: Any = tensor_parallel.ParallelModel(mpu.get_model_parallel_group())
        elif kind == "init":
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = models.build("llama")
        else:
            model = models.build("llama")
        if kind == "tp":  # embeddings and head, the largest matrices, are replicated
            for name in ("lm_head", "model.embed_tokens"):
                model._tp_plan.pop(name, None)
        if kind in ("sp", "mesh"):
            mpu = _sequence_parallel(model)
            arguments = {"mpu": mpu} if kind == "sp" else {}
        if kind == "accelerate":
            engine = _accelerated(model, config)
        else:
            engine = models.start(model, config, **arguments)
        engine.train()
        try:
            yield engine
        finally:
            engine.destroy()
            groups.mesh_device = None


def loss_at(engine: Any, kind: str, step: int) -> torch.Tensor:
    replica = dist.get_rank() // SIZE
    if kind == "megatron":
        generator = torch.Generator().manual_seed(1000 * step + replica)
        return engine(torch.randn(2, 5, 7, generator=generator))  # type: ignore[no-any-return]
    data = models.batch("llama", step, replica)
    if kind not in ULYSSES:
        return models.loss_of(engine(**data))
    tokens, labels = data["input_ids"], data["labels"].roll(-1, 1)
    labels[:, -1] = -100
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    own = [x.chunk(SIZE, 1)[dist.get_rank() % SIZE] for x in (tokens, labels, places)]
    if kind == "accelerate":
        rows = {"input_ids": tokens, "labels": data["labels"], "position_ids": places}
        part = next(engine.cut([rows], engine))
        own = [part[name] for name in ("input_ids", "shift_labels", "position_ids")]
    logits = engine(input_ids=own[0], position_ids=own[2]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, own[1].flatten())
    group = parallel_state_sp.get_sequence_parallel_group()
    return _MeanOfTokens.apply(loss, (own[1] != -100).sum(), group)  # type: ignore[no-any-return]


def _train(engine: Any, kind: str, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_at(engine, kind, step)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def digests(engine: Any) -> dict[str, str]:
    """Return digests of this rank's shards without padding, by name."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        part = parameter.ds_tensor.detach().flatten()
        start = dist.get_rank(parameter.ds_process_group) * part.numel()
        found[name] = models.digest([part[: max(0, min(part.numel(), parameter.ds_numel - start))]])
    return found


def _owed(engine: Any) -> dict[str, torch.Tensor]:
    sums = {}
    for name, residual in sorted(ds_ckpt.session_of(engine).residuals.items()):
        sums[name] = residual.double()
        dist.all_reduce(sums[name], group=engine.optimizer.dp_process_group)
    return sums


@once(when=lambda kind, sections, *_, **__: not sections)
def run(kind, sections, steps, *, slots=None, skewed=False, save="", **options) -> dict[str, Any]:
    """Train; what the weights were and are, and what is said.

    Args:
        slots: pretended nodes of so many ranks.
        skewed: every other rank's clock finds compressed steps fast, and the others' slow; a
            comparison then has one step of each.
        save: a folder, written two steps before the end.
    """
    before, tuning.COUNTED_STEPS = tuning.COUNTED_STEPS, 1 if skewed else tuning.COUNTED_STEPS
    try:
        with (
            hosts(slots or [dist.get_world_size()]),
            engine_of(kind, sections, **options) as engine,
        ):
            session, start = ds_ckpt.session_of(engine), digests(engine)
            if skewed:
                _skew(session.exchange.step.tuner)
            losses = _train(engine, kind, 0, steps - 2)
            owed = _owed(engine) if session else {}
            if save:
                engine.save_checkpoint(save, tag="good")
            losses += _train(engine, kind, steps - 2, steps)
            tuner = session.exchange.step.tuner if session and session.exchange else None
            return {
                "losses": losses,
                "start": start,
                "end": digests(engine),
                "owed": owed,
                "choice": tuner.choice if tuner else None,
                "summary": session.summary if session else "",
                "moved": session.offload.out.total() if session and session.offload else 0,
                "kept": dict(session.partition.kept_bytes) if session and session.partition else {},
                "skipped": int(engine.skipped_steps),
                "norm": float(engine.get_global_grad_norm()),
            }
    finally:
        tuning.COUNTED_STEPS = before


def _skew(tuner: Any) -> None:
    def seconds() -> float:
        is_fast = (tuner.current == "compressed") == (dist.get_rank() % SIZE == 0)
        return 1.0 if is_fast else 4.0 if tuner.current == "compressed" else 2.0

    models.set_clock(tuner, seconds)


def resume(kind, sections, folder, bad, first, last, *, tag="good", **options) -> dict[str, Any]:
    """Load tags that are refused, then a good one, and train on."""
    with engine_of(kind, sections, **options) as engine:
        _train(engine, kind, 50, 51)
        weights, owed, said = digests(engine), _owed(engine), {}
        for name in bad:
            try:
                engine.load_checkpoint(folder, tag=name)
            except (ds_ckpt.StateError, ZeRORuntimeException) as error:
                said[name] = str(error)
        same = weights == digests(engine) and _equal(owed, _owed(engine))
        engine.load_checkpoint(folder, tag=tag)
        found = {"said": said, "unchanged": same, "owed": _owed(engine)}
        return {**found, "losses": _train(engine, kind, first, last), "end": digests(engine)}


def _equal(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return some.keys() == other.keys() and all(torch.equal(some[n], other[n]) for n in some)


def conservation(kind: str, sections: dict[str, Any], steps: int) -> float:
    """Law 3 in a step: the largest gap, relative, of what came in against what is left and owed."""
    with engine_of(kind, sections, bucket=10**7) as engine:
        _train(engine, kind, 0, steps)
        group = engine.optimizer.dp_process_group
        session, before, seen = ds_ckpt.session_of(engine), _owed(engine), {}
        exchange = session.exchange.step
        choose = exchange.choose_reduction

        def watched(names: Any, loss_scale: float) -> Any:
            reduction = choose(names, loss_scale)

            def reduce(tensors: Any) -> Any:
                given = [t.double().flatten() for t in tensors]
                result = reduction(tensors)
                seen.update(zip(names, zip(given, result, strict=True), strict=True))
                return result

            return reduction and reduce

        exchange.choose_reduction = watched
        _train(engine, kind, steps, steps + 1)
        after, worst = _owed(engine), 0.0
        world, me = dist.get_world_size(group), dist.get_rank(group)
        for name, left in after.items():
            given, delivered = seen[name]
            dist.all_reduce(given, group=group)
            put_in = before[name] + given / world
            whole = torch.zeros(-(-len(given) // world) * world, dtype=torch.float64)
            start = me * (len(whole) // world)
            whole[start : start + len(delivered)] = delivered.double()
            dist.all_reduce(whole, group=group)
            gap = (put_in - whole[: len(given)] - left).abs().max() / put_in.abs().max()
            worst = max(worst, float(gap))
        assert after
        return worst


def _with_inputs(kind: str, section: dict[str, Any]) -> dict[str, Any]:
    """Checkpointed blocks whose inputs go to the host, split first with tensor parallelism."""
    activation: dict[str, Any] = {"policy": "block", "offload_min_bytes": 0}
    inputs = {"cpu_checkpointing": True}
    if kind not in ULYSSES:
        activation["partition_min_bytes"] = 0
        inputs["partition_activations"] = True
    if kind == "megatron":
        activation["modules"] = ["ParallelBlock"]
    return {"ds_ckpt": {"activation": activation, **section}, "activation_checkpointing": inputs}


def _check_replicas(ranks: list[Any]) -> None:
    """Neighbours are tensor-parallel, and have shards of the same places."""
    for one, other in (ranks[:2], ranks[2:]):
        equal = [n for n, digest in one["start"].items() if other["start"][n] == digest]
        assert {n for n in equal if "norm" in n} < set(equal) < set(one["start"])
        assert [n for n in equal if one["end"][n] != other["end"][n]] == []
        kept = [n for n in equal if n in one["owed"]]
        assert [n for n in kept if not one["owed"][n].equal(other["owed"][n])] == []
        assert one["start"] != one["end"]


def _flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7] + b"1234567")


@pytest.mark.parametrize("kind", ["megatron", *slow("tp", "sp", "mesh", "accelerate")])
def test_dense_is_deepspeed_to_the_bit(world4: Any, kind: str) -> None:
    """Bucket by bucket; with a sum of two ranks there is one order, with four there are more."""
    stock = world4.run(run, kind, {}, 4, timeout=240)
    sections = {"ds_ckpt": DENSE} if kind == "mesh" else _with_inputs(kind, DENSE)
    ours = world4.run(run, kind, sections, 4, timeout=240)
    for expected, got in zip(stock, ours, strict=True):
        if kind not in ULYSSES:
            assert got["end"] == expected["end"]
            assert got["kept"]
        assert got["skipped"] == 0
        assert got["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert got["norm"] == pytest.approx(expected["norm"], rel=1e-5)


def test_replicas_stay_equal_where_ranks_disagree_on_times(world4: Any) -> None:
    """The tuner's choice is one of the program; of one slice's ranks alone it would be another."""
    section = topk_section(
        method="quantize", quantize={"bits": 3}, exchange={"autotune": True}, warmup_steps=1
    )
    ranks = world4.run(run, "tp", {"ds_ckpt": section}, 9, skewed=True, timeout=240)
    assert {rank["choice"] for rank in ranks} == {"deepspeed"}
    _check_replicas(ranks)


@pytest.mark.parametrize("method", ["topk", *slow("powersgd")])
def test_tensor_parallel_state_is_resumed_to_the_bit_or_refused_on_all(
    world4: Any, tmp_path: Path, method: str
) -> None:
    """Each slice has its files; other slices', damaged ones and other sizes change nothing.

    Residuals are rounded at random, alike on the ranks that replicate a parameter.
    """
    compression = {**METHODS[method]["compression"], "error_feedback": {"dtype": "bf16"}}
    sections = _with_inputs("tp", {"compression": compression})
    saved = world4.run(run, "tp", sections, 5, save=str(tmp_path), timeout=240)
    _check_replicas(saved)
    good = tmp_path / "good"
    names = sorted(p.name for p in good.glob("ds_ckpt_residuals_*"))
    assert [n[18:35] for n in names] == [f"mp0{s}of02_0000{r}_of" for s in (0, 1) for r in (0, 1)]
    bad = {
        "swapped": "of02' under this name",
        "flipped": "checksum",
        "missing": "model slices mp00of02",
        "four": "model slices mp00of04, mp01of04",
        "whole": "this rank holds mp0",
    }
    for tag in bad:
        shutil.copytree(good, tmp_path / tag)
    first, second = (tmp_path / "swapped" / names[i] for i in (0, 2))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    _flip(tmp_path / "flipped" / names[3])
    for name in names:
        if "mp01" in name:
            (tmp_path / "missing" / name).unlink()
        path = tmp_path / "four" / name
        path.rename(path.with_name(name.replace("of02_", "of04_")))
        (tmp_path / "whole" / name).unlink()
        (tmp_path / "whole" / name.replace("mp00of02_", "")).write_bytes(b"")
    loaded = world4.run(resume, "tp", sections, str(tmp_path), list(bad), 3, 5, timeout=240)
    for before, after in zip(saved, loaded, strict=True):
        assert after["unchanged"]
        assert {tag: words for tag, words in bad.items() if words not in after["said"][tag]} == {}
        assert after["losses"] == before["losses"][-2:]
        assert after["end"] == before["end"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"), [("tp", "topk"), ("tp", "powersgd"), ("sp", "topk"), ("mesh", "topk")]
)
def test_another_data_parallel_size_keeps_the_sum(world2, world4, tmp_path, kind, method) -> None:
    """DeepSpeed loads a universal checkpoint alone; other tensor-parallel sizes start at 0."""
    sections, folder = {"ds_ckpt": METHODS[method]}, str(tmp_path)
    saved = world4.run(run, kind, sections, 5, save=folder, timeout=240)
    universal = convert(tmp_path, "good")
    how = {"checkpoint": {"load_universal": True}, "tag": universal.name, "timeout": 240}
    loaded = world2.run(resume, kind, sections, folder, [], 3, 5, **how)
    for before, after in zip(saved[:2], loaded, strict=True):
        assert after["losses"][0] == pytest.approx(before["losses"][3], abs=1e-6)
        assert before["owed"].keys() == after["owed"].keys()
        assert any(total.any() for total in after["owed"].values())
        for name, total in before["owed"].items():
            assert torch.allclose(total, after["owed"][name], rtol=1e-6, atol=1e-9)
    if kind != "tp":
        return
    shutil.copytree(universal, tmp_path / "without")
    for path in (tmp_path / "without").glob("ds_ckpt_residuals_*"):
        path.unlink()
    how["tag"] = "without"
    for rank in world2.run(resume, "data", sections, folder, [universal.name], 3, 5, **how):
        assert rank["unchanged"]
        assert "model slices mp00of02, mp01of02" in rank["said"][universal.name]
        assert "remove the ds_ckpt_residuals_* files" in rank["said"][universal.name]
        assert rank["owed"] == {}
        assert rank["losses"]


@pytest.mark.parametrize("kind", ["sp", *slow("tp", "megatron", "mesh")])
@pytest.mark.parametrize("method", ["topk", *slow("quantize", "powersgd", "entropy_coded")])
def test_nothing_is_lost(world4: Any, kind: str, method: str) -> None:
    """Residuals are in units of the mean over all ranks that share a parameter."""
    for worst in world4.run(conservation, kind, {"ds_ckpt": METHODS[method]}, 2):
        assert worst < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("kind", ["tp", "megatron", "sp", "mesh", "accelerate"])
def test_methods_train_alike_with_and_without_offloaded_inputs(world4, kind, method) -> None:
    plain = world4.run(run, kind, {"ds_ckpt": METHODS[method]}, 12, timeout=240)
    moved = world4.run(run, kind, _with_inputs(kind, METHODS[method]), 12, timeout=240)
    for one, other in zip(plain, moved, strict=True):
        assert one["end"] == other["end"]
        assert one["losses"] == other["losses"]
        assert one["owed"]
        assert (one["moved"], other["moved"] > 0) == (0, True)
    if kind in ("tp", "megatron"):
        _check_replicas(plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["megatron", "sp", "mesh"])
@pytest.mark.parametrize("method", ["topk", "quantize", "powersgd"])
def test_state_is_resumed_to_the_bit(world4: Any, tmp_path: Path, method: str, kind: str) -> None:
    sections = _with_inputs(kind, METHODS[method])
    saved = world4.run(run, kind, sections, 5, save=str(tmp_path), timeout=240)
    names = "mp0?of02_0000?_of_00002.*" if kind == "megatron" else "0000?_of_00004.*"
    assert len(list((tmp_path / "good").glob(f"ds_ckpt_residuals_{names}"))) == 4
    shutil.copytree(tmp_path / "good", tmp_path / "flipped")
    _flip(sorted((tmp_path / "flipped").glob(f"ds_ckpt_residuals_{names}"))[3])
    loaded = world4.run(resume, kind, sections, str(tmp_path), ["flipped"], 3, 5, timeout=240)
    for before, after in zip(saved, loaded, strict=True):
        assert after["unchanged"]
        assert "checksum" in after["said"]["flipped"]
        assert after["losses"] == before["losses"][-2:]
        assert after["end"] == before["end"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp", "sp", "megatron", "accelerate"])
@pytest.mark.parametrize("deltas", ["lossless", "none"])
def test_resident_weights_are_deepspeeds_to_the_bit(world4: Any, kind: str, deltas: str) -> None:
    """Two nodes of two: tensor- and sequence-parallel ranks share a node."""
    bf16 = {"bf16": {"enabled": True}}
    stock = world4.run(run, kind, {}, 5, timeout=240, **bf16)
    section = {"weights": {"resident": True, "deltas": deltas}}
    ours = world4.run(run, kind, {"ds_ckpt": section}, 5, slots=[2, 2], timeout=240, **bf16)
    for expected, got in zip(stock, ours, strict=True):
        assert "resident on each of 2 nodes" in got["summary"]
        assert got["losses"] == expected["losses"]
        assert got["end"] == expected["end"]
    if kind not in ULYSSES:
        _check_replicas(ours)


@pytest.mark.slow
def test_parameters_of_another_group_are_left_to_deepspeed(world4: Any) -> None:
    """Parameters that zero.Init made, and AutoTP did not split, are sharded over all ranks."""
    stock = world4.run(run, "init", {}, 4, timeout=240)
    dense = world4.run(run, "init", {"ds_ckpt": DENSE}, 4, timeout=240)
    for expected, same in zip(stock, dense, strict=True):
        assert same["end"] == expected["end"]
        assert "left to DeepSpeed, as another process group shards them, on" in same["summary"]
    for worst in world4.run(conservation, "init", {"ds_ckpt": METHODS["topk"]}, 2):
        assert worst < 3e-5


@pytest.mark.slow
@ranks(2, 2)
def test_resident_weights_of_several_groups_are_refused() -> None:
    with refused("several process groups"), engine_of("init", {"ds_ckpt": RESIDENT}) as engine:
        _train(engine, "init", 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "section"), [("megatron", RESIDENT), ("tp", topk_section(exchange={"levels": 2}))]
)
@ranks(1, 3, timeout=60)
def test_groups_that_lie_otherwise_on_nodes_are_refused_together(kind, section) -> None:
    """Ranks 0 and 2 are on two nodes, 1 and 3 on one: nobody waits for a group of the others."""
    words = "process groups are divided over nodes unequally"
    with refused(words), engine_of(kind, {"ds_ckpt": section}) as engine:
        _train(engine, kind, 0, 1)


@pytest.mark.slow
def test_groups_that_lie_otherwise_on_nodes_have_one_level(world4: Any) -> None:
    _check_replicas(world4.run(run, "tp", {"ds_ckpt": METHODS["topk"]}, 4, slots=[1, 3]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tp", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]),
        ("megatron", ["blocks.1.up.weight", "blocks.1.norm.weight"]),
        ("sp", ["model.norm.weight"]),
        ("mesh", ["model.norm.weight"]),
    ],
)
@ranks(4, timeout=240)
def test_a_step_with_nan_is_skipped_by_all(kind: str, names: list[str]) -> None:
    """DeepSpeed's norm counts replicated parameters on the first tensor-parallel rank alone."""
    for name, bad in itertools.product(names, ([2, 3], [3])):
        with engine_of(kind, {"ds_ckpt": METHODS["quantize"]}) as engine:
            _train(engine, kind, 0, 3)
            weights, owed = digests(engine), _owed(engine)
            if dist.get_rank() in bad:
                parameter = dict(engine.module.named_parameters())[name]
                handle = parameter.register_hook(lambda g: torch.full_like(g, torch.nan))
            _train(engine, kind, 3, 4)
            if dist.get_rank() in bad:
                handle.remove()
            assert weights == digests(engine)
            assert _equal(owed, _owed(engine))
            _train(engine, kind, 4, 5)
            assert engine.skipped_steps == 1, (name, bad)


@ranks(4, timeout=240)
def test_a_tensor_parallel_rank_trains_its_shards_on_its_own_gradients() -> None:
    own: dict[str, torch.Tensor] = {}
    with engine_of("tp", {"ds_ckpt": DENSE}) as engine:
        ds_ckpt.session_of(engine).send_no_gradients()
        me = dist.get_rank(engine.optimizer.dp_process_group)
        for name, parameter in engine.module.named_parameters():
            parameter.register_hook(functools.partial(own.__setitem__, name))
        engine.backward(loss_at(engine, "tp", 0))
        for name, parameter in engine.module.named_parameters():
            shard = safe_get_local_grad(parameter).flatten()
            part = own[name].flatten()[me * len(shard) :][: len(shard)]
            assert torch.equal(shard[: len(part)], part), name
