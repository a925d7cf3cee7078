"""Partitioned checkpoints with AutoTP and with a Megatron-style mpu, under ZeRO-3.

Bytes are exactly 1/t, gradients bit-equal to the same run without checkpointing, and every group
whose processes do not hold the same is refused in all of them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import ds_ckpt
from ds_ckpt.telemetry import Counters
from ds_ckpt.telemetry.counters import PartitionCounters, Purpose
from tests import architectures
from tests.distributed import models, tensor_parallel
from tests.distributed.models import equal
from tests.distributed.pool import fresh, once, ranks
from tests.distributed.tensor_parallel import MegatronMpu, ParallelModel, mpu_forgotten, neighbours
from tests.distributed.training import of_all_ranks, refused
from tests.unit.offload_models import device_bytes, host_bytes

HIDDEN = 2 * 11 * 32 * 4
"""Bytes of one boundary of AutoTP's models here: 2 sequences of 11 tokens, width 32, fp32."""
MEGATRONS = 2 * 5 * 16 * 4
"""Bytes of one boundary of the Megatron-style model."""
SLOW = pytest.mark.slow


def _sections(**own: Any) -> dict[str, Any]:
    return {
        "activation_checkpointing": {"partition_activations": True},
        "ds_ckpt": {"activation": {"partition_min_bytes": HIDDEN, **own}},
    }


def _build(kind: str, dropout: float) -> torch.nn.Module:
    own = {"llama": {"num_key_value_heads": 4}, "gpt_neox": {"hidden_dropout": dropout}}[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4}
    return architectures.build(kind, 3, attention_dropout=dropout, **sizes, **own)


@once(when=lambda kind, size, sections, **how: not sections)
def _auto(kind: str, size: int, sections: dict[str, Any], *, dropout=0.0, seeds="equal") -> Any:
    """Two steps under AutoTP and ZeRO-3: gradients, what was kept, what was sent.

    Args:
        seeds: "equal" in the whole tensor-parallel group, or "different" in each process.
    """
    fresh()
    with tensor_parallel.auto_tp(size):
        model = _build(kind, dropout)
        config = models.zero3_config(reuse=0, tensor_parallel={"autotp_size": size}, **sections)
        engine = models.start(model, config)
        try:
            return _train(engine, kind, size, seeds)
        finally:
            engine.destroy()


def _train(engine: Any, kind: str, size: int, seeds: str) -> Any:
    session = ds_ckpt.session_of(engine)
    inputs: list[tuple[int, StorageWeakRef]] = []

    def see(_: Any, args: Any) -> None:
        storage = args[0].untyped_storage()
        inputs.append((storage.nbytes(), StorageWeakRef(storage)))

    layers = [m for m in engine.module.modules() if models.is_layer(m)]
    handles = [layer.register_forward_pre_hook(see) for layer in layers]
    replica = dist.get_rank() // size
    found = SimpleNamespace(gradients=[], losses=[], alive=[], kept=[], whole=[])
    found.summary = session.summary if session else ""
    counters = session.counters if session else Counters()
    for step in range(2):
        seed = 31 * step + replica
        torch.manual_seed(seed if seeds == "equal" else 1000 * seed + dist.get_rank())
        inputs.clear()
        before = counters.snapshot()
        loss = engine(**architectures.batch(kind, 1000 * replica + step)).loss
        found.alive.append(sum(not ref.expired() for _, ref in inputs))
        found.whole.append(sum(nbytes for nbytes, _ in inputs))
        store = session._inputs.store if session and session._inputs else None
        partition = session.partition if session else None
        found.kept.append(dict(partition.kept_bytes) if partition else {})
        engine.backward(loss)
        found.losses.append(float(loss))
        found.gradients += models.gradients(engine)
        found.sent = (counters.snapshot() - before).bytes_sent[Purpose.PARTITION]
        engine.step()
        if partition is not None:
            found.late = partition.late
            session._inputs.partition.counters = PartitionCounters()
        del loss
    for handle in handles:
        handle.remove()
    if store is not None:
        found.left_over = (device_bytes(store), host_bytes(store))
        found.out = store.counters.out.total()
    return found


def _check(kind: str, size: int, sections: dict[str, Any], **how: Any) -> Any:
    plain, split = _auto(kind, size, {}, **how), _auto(kind, size, sections, **how)
    assert split.losses == plain.losses
    assert equal(split.gradients, plain.gradients)
    assert split.alive == [0, 0]  # whole, none of the boundaries is anywhere
    assert split.left_over == (0, 0)
    return split


@pytest.mark.parametrize(
    ("slots", "kind", "size"),
    [
        pytest.param([2], "llama", 2, marks=SLOW),
        pytest.param([2], "gpt_neox", 2, marks=SLOW),
        pytest.param([4], "llama", 2, marks=SLOW),
        ([4], "llama", 4),
    ],
)
@ranks(timeout=240)
def test_autotp(kind: str, size: int) -> None:
    split = _check(kind, size, _sections())
    assert split.whole == [3 * HIDDEN] * 2
    boundaries = [name for name in split.kept[0] if "." in name]
    assert len(boundaries) == 3
    assert split.kept == [dict.fromkeys(boundaries, HIDDEN // size)] * 2
    # the parts of 3 checkpointed inputs, and the rank-consistency check's 3 numbers
    assert split.sent == (size - 1) * (3 * HIDDEN // size + 24)
    assert split.late == 1
    summary = split.summary.partition("inputs")[2]
    assert summary.count("split over the tensor-parallel group") > summary.count("if there")


@ranks(2, timeout=240)
def test_autotp_with_offload_and_everything_split() -> None:
    sections = _sections(partition_min_bytes=0, offload_min_bytes=0)
    sections["activation_checkpointing"] |= {"cpu_checkpointing": True}
    split = _check("llama", 2, sections)
    # two of three boundaries go out and come back, in each of the two steps
    assert split.out == 2 * 2
    assert split.kept[0]["model.layers.1"] == HIDDEN // 2
    assert split.kept[0]["model.layers.0"] > HIDDEN // 2  # with the rotary tables


@ranks(2, timeout=240)
def test_dropout_is_replayed_where_the_group_draws_the_same() -> None:
    split = _check("gpt_neox", 2, _sections(), dropout=0.2)
    assert split.kept[0]
    assert _auto("gpt_neox", 2, {}).losses != split.losses


@ranks(2, timeout=240)
def test_dropout_that_differs_over_the_group_is_found() -> None:
    sections = _sections(partition_min_bytes=0)
    # without dropout seeds change nothing
    _auto("gpt_neox", 2, sections, dropout=0.0, seeds="different")
    with refused("other values on some of the ranks 0, 1", "equal seeds for dropout") as error:
        _auto("gpt_neox", 2, sections, dropout=0.2, seeds="different")
    one, other = of_all_ranks(str(error.value))
    assert one == other


def _megatron(mpu: Any, model: Any, sections: dict[str, Any], *, way: str = "initialize") -> Any:
    """An engine of a Megatron-style model.

    Args:
        way: "attach" to an engine that knows of its mpu only through `attach`; else it is handed
            over at the start.
    """
    config = models.zero3_config(reuse=0, **sections)
    engine = models.start(model, config, plugin=way != "attach", mpu=mpu)
    if way == "attach":
        engine.mpu = None
        ds_ckpt.attach(engine, mpu=mpu)
    return engine


@pytest.mark.parametrize(
    ("slots", "way", "dropout"), [([2], "initialize", 0.3), ([2], "old", 0.0), ([4], "attach", 0.3)]
)
@ranks()
def test_a_megatron_style_mpu(way: str, dropout: float) -> None:
    """One step; an old Megatron's mpu has other names."""
    results, replica = [], dist.get_rank() // 2
    none = {"ds_ckpt": {"activation": {"policy": "none"}}}
    ours = _sections(modules=["ParallelBlock"], partition_min_bytes=MEGATRONS)
    for sections, how in ((none, "initialize"), (ours, way)):
        fresh()
        mpu = MegatronMpu(neighbours(2), tensor_parallel.across(2), old=how == "old")
        with mpu_forgotten():
            model = ParallelModel(mpu.get_model_parallel_group(), dropout=dropout)
            engine = _megatron(mpu, model, sections, way=how)
            torch.manual_seed(replica)
            x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(replica))
            session, loss = ds_ckpt.session_of(engine), engine(x)
            kept = dict(session.partition.kept_bytes) if sections is ours else {}
            engine.backward(loss)
            results.append((float(loss), models.gradients(engine)))
            engine.step()
            engine.destroy()
    (expected, gradients), (loss, split) = results
    assert loss == expected
    assert equal(gradients, split)
    assert kept == {f"blocks.{i}": MEGATRONS // 2 for i in range(3)}
    losses = of_all_ranks(loss)
    if len(losses) == 4:  # two replicas of other data
        assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, ["no tensor-parallel group", "data-parallel", "autotp_size"]),
        (1, ["one rank in the tensor-parallel group"]),
    ],
)
@ranks(2)
def test_groups_that_hold_other_tensors_are_refused(size: int, words: list[str]) -> None:
    mpu = MegatronMpu(neighbours(1), neighbours(dist.get_world_size())) if size else None
    own = {"policy": "block", "partition": True, "modules": ["ParallelBlock"]}
    with mpu_forgotten(), refused("$.ds_ckpt.activation.partition:", *words):
        _megatron(mpu, ParallelModel(None), {"ds_ckpt": {"activation": own}})


@pytest.mark.parametrize(("slots", "what"), [([2], "data"), ([2], "length"), ([4], "blocks")])
@ranks(timeout=60)
def test_data_parallel_processes_in_disguise_are_found(what: str) -> None:
    """An mpu calls ranks tensor-parallel that have other values, shapes or numbers of blocks."""
    world, me = dist.get_world_size(), dist.get_rank()
    sections = _sections(modules=["ParallelBlock"], partition_min_bytes=0)
    with mpu_forgotten():
        model = ParallelModel(None, blocks=3 + (me if what == "blocks" else 0))
        engine = _megatron(MegatronMpu(neighbours(world), neighbours(1)), model, sections)
        seed = torch.Generator().manual_seed(me if what == "data" else 0)
        x = torch.randn(2, 5 + (me if what == "length" else 0), 7, generator=seed)
        words = "checkpointed inputs cannot be split over this group", "on some of the ranks 0, 1"
        with refused(*words):
            engine.backward(engine(x))
        engine.destroy()
