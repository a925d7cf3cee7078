"""The state of resident weights: what every host holds after each step, each load and each end."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

import ds_ckpt
from ds_ckpt.engine.tuner import COUNTED_STEPS
from ds_ckpt.telemetry import Purpose
from ds_ckpt.weights import changes
from ds_ckpt.zero3.weights_hook import WeightsHook
from tests.distributed import models
from tests.distributed.models import digest, quantize_section
from tests.distributed.pool import fresh, hosts, once, ranks
from tests.distributed.test_weights import FP32, LOSSLESS, ONE, SLOW, TWO, WHOLE, stale_copies
from tests.distributed.test_weights import pytestmark as pytestmark
from tests.distributed.training import chunks_of, fp16_on_cpu, resident_config

HALF = 1 + COUNTED_STEPS
"""Steps of one codec in a comparison of two."""
AUTO = {"weights": {"resident": True}}
BLOCK = {"activation": {"policy": "block"}}
FP16 = {
    **FP32,
    # the scale begins too high, and doubles after every step
    "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 1},
}
SMALL_GROUPS = {"stage3_param_persistence_threshold": 400, "sub_group_size": 1000}
GATHERS = (Purpose.GATHER_FORWARD, Purpose.GATHER_RECOMPUTE, Purpose.GATHER_BACKWARD)
_GROUPS = dist.distributed_c10d._world.pg_map


class OddModel(models.PlainModel):
    """Has single elements, sizes that no world divides, and weights without a gradient: some in
    every other step, one always."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1, 1))
        self.sometimes = nn.Linear(17, 17)
        self.never = nn.Parameter(torch.ones(3))
        self.even = True

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.to(self.scale.dtype)
        if self.even:
            x = x + self.sometimes(x)
        return super().forward(x * self.scale + self.shift, labels)


def _every_other(engine: Any, step: int, micro: int) -> None:
    engine.module.even = step % 2 == 0


@contextmanager
def _engine(kind, section, zero=None, make_fresh=True, **options) -> Iterator[Any]:
    """An engine; `zero` are further keys of `zero_optimization`."""
    if make_fresh:
        fresh()
    config = resident_config(section, **options)
    config["zero_optimization"].update(zero or {})
    if kind == "odd":
        torch.manual_seed(0)
        model = OddModel()
        flat = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
            {"params": flat, "weight_decay": 0.0},
        ]
        engine, *_ = ds_ckpt.initialize(model=model, model_parameters=groups, config=config)
        engine.train()
    else:
        engine = models.start(kind, config)
    try:
        yield engine
    finally:
        engine.destroy()


def _train(engine: Any, kind: str, first: int, end: int) -> list[float]:
    if kind == "odd":
        return models.train(engine, "plain", end - first, first=first, spoil=_every_other)
    return models.train(engine, kind, end - first, first=first)


def _evaluate(engine: Any, kind: str) -> float:
    engine.eval()
    data = models.batch("plain" if kind == "odd" else kind, 99, dist.get_rank())
    with torch.no_grad():
        loss = float(models.loss_of(engine(**data)))
    engine.train()
    return loss


@contextmanager
def _crossing_hosts(slots: list[int]) -> Iterator[list[str]]:
    """Names of the collectives of weights that processes of several hosts take part in, or one
    alone, which has nothing to gather."""
    host = [h for h, count in enumerate(slots) for _ in range(count)]
    seen: list[str] = []

    def watched(name: str) -> Any:
        original = getattr(comm.cdb, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = [kwargs.get("group"), *args, dist.group.WORLD]
            group = next(one for one in given if isinstance(one, dist.ProcessGroup))
            members = dist.get_process_group_ranks(group)
            if len(members) == 1 or len({host[rank] for rank in members}) > 1:
                seen.append(name)
            return original(*args, **kwargs)

        return patch.object(comm.cdb, name, call)

    with watched("all_gather_into_tensor"), watched("all_gather"):
        yield seen


def _sent(engine: Any, *purposes: Purpose) -> int:
    session = ds_ckpt.session_of(engine)
    return sum(session.counters.bytes_sent.get(p, 0) for p in purposes) if session else 0


@once(when=lambda slots, kind, section, *a, **o: "weights" not in section)
def _laws(slots, kind, section, steps, chunk=changes.CHUNK, **options) -> Any:
    """Train with an evaluation after each step; what is kept and what has crossed, step by step."""
    keys = ("losses", "evaluated", "weights", "skipped", "crossing", "sent", "gathered", "kept")
    found = SimpleNamespace(**{key: [] for key in keys})
    with fp16_on_cpu(), chunks_of(chunk), _engine(kind, section, **options) as engine:
        session = ds_ckpt.session_of(engine)
        for step in range(steps):
            sent, gathered = _sent(engine, Purpose.WEIGHTS), _sent(engine, *GATHERS)
            skipped = engine.skipped_steps
            with _crossing_hosts(slots) as crossing:
                found.losses += _train(engine, kind, step, step + 1)
                found.sent.append(_sent(engine, Purpose.WEIGHTS) - sent)
                found.evaluated.append(_evaluate(engine, kind))
            found.crossing.append(len(crossing))
            found.gathered.append(_sent(engine, *GATHERS) - gathered)
            found.skipped.append(engine.skipped_steps - skipped)
            found.weights.append(models.weights_digest(engine))
            if session and session._resident and session._resident.hook.is_attached:
                if "torch_autocast" not in options:  # which rounds what is gathered
                    assert stale_copies(engine) == []
                kept = [p.ds_secondary_tensor for p in engine.module.parameters()]
                found.kept.append(digest(kept))
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        found.owned = sum(-(-p.ds_numel // dist.get_world_size()) * p.itemsize for p in trained)
        found.summary = session.summary if session else ""
    return found


def _same(ours: Any, plain: Any) -> None:
    for key in ("losses", "evaluated", "weights", "skipped"):
        assert getattr(ours, key) == getattr(plain, key), key


@pytest.mark.parametrize(
    ("slots", "kind", "section", "options"),
    [
        (ONE, "llama-tied", {**BLOCK, **LOSSLESS}, {"accumulation": 2, "chunk": 300}),
        (ONE, "llama", LOSSLESS, FP16),
        (ONE, "lora", LOSSLESS, {}),
        (ONE, "plain", WHOLE, FP32),
        (ONE, "odd", LOSSLESS, {"zero": SMALL_GROUPS}),
        (TWO, "odd", LOSSLESS, {"zero": {**SMALL_GROUPS, "zero_hpz_partition_size": 2}}),
        *(
            (ONE, "llama", {**beside, **LOSSLESS}, {"accumulation": 2})
            for beside in (quantize_section(), {**BLOCK, **quantize_section(rules=[])})
        ),
        pytest.param(ONE, "llama-tied", LOSSLESS, {"offload_optimizer": True}, marks=SLOW),
        pytest.param(ONE, "mixtral", LOSSLESS, {"reuse": 0}, marks=SLOW),
        pytest.param(TWO, "llama", {**BLOCK, **WHOLE}, {"accumulation": 2}, marks=SLOW),
        pytest.param(TWO, "llama-tied", LOSSLESS, {"accumulation": 2, "chunk": 200}, marks=SLOW),
    ],
)
@pytest.mark.sampled(5)
@ranks()
def test_after_every_step_all_hosts_hold_what_the_owners_have(
    slots: list[int], kind: str, section: dict[str, Any], options: dict[str, Any]
) -> None:
    """Training is DeepSpeed's to the bit, and gathers stay inside a host."""
    steps = 5
    without = {key: value for key, value in section.items() if key != "weights"}
    plain = _laws(slots, kind, without, steps, **options)
    ours = _laws(slots, kind, section, steps, **options)
    _same(ours, plain)
    assert len(ours.kept) == steps
    assert ours.crossing[1:] == [0] * (steps - 1)
    assert sum(plain.crossing[1:]) >= steps - 1
    assert [bool(b) for b in ours.gathered] == [slots == TWO] * steps
    assert ours.summary.count("weights resident") == ours.summary.count("on each of 2 nodes") == 1
    # a step that is skipped sends nothing and changes nothing
    assert [bool(sent) for sent in ours.sent] == [not s for s in ours.skipped]
    kept = zip(ours.kept, ours.kept[1:], strict=False)
    assert [a == b for a, b in kept] == [bool(s) for s in ours.skipped[1:]]
    assert (0 < sum(ours.skipped) < steps - 1) == ("fp16" in options)


@pytest.mark.parametrize(
    ("slots", "kind", "persistence"), [(ONE, "shared", 0), (TWO, "llama-tied", 5000)]
)
@ranks()
def test_weights_that_torch_autocast_rounds(slots: list[int], kind: str, persistence: int) -> None:
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    options = {**FP32, **autocast, "persistence": persistence}
    plain, ours = (_laws(slots, kind, section, 4, **options) for section in ({}, WHOLE))
    _same(ours, plain)


@pytest.mark.slow
@ranks(1, 1)
def test_codecs_are_compared_by_step_time() -> None:
    """Both take turns; training is the same with any."""
    plain, ours = (_laws(ONE, "llama", section, 2 * HALF + 2) for section in ({}, AUTO))
    _same(ours, plain)
    assert "changes sent lossless or uncompressed" in ours.summary
    lossless, uncompressed = ours.sent[:HALF], ours.sent[HALF : 2 * HALF]
    assert len(set(uncompressed)) == 1
    assert max(lossless[1:]) < uncompressed[0]


@pytest.mark.slow
@ranks(1, 1, timeout=280)
def test_two_hundred_steps_are_those_of_deepspeed() -> None:
    """Every loss, past two comparisons of checksums between hosts."""
    plain, ours = (_laws(ONE, "llama", section, 203, accumulation=2) for section in ({}, AUTO))
    _same(ours, plain)


@ranks(1, 1)
def test_changes_are_few_bytes() -> None:
    """Most weights do not change in a step with a small learning rate."""
    whole, lossless = (_laws(ONE, "llama", section, 5, lr=1e-5) for section in (WHOLE, LOSSLESS))
    assert lossless.losses == whole.losses
    assert 0 < sum(lossless.sent) < sum(whole.sent) / 5


@ranks(2)
def test_on_one_host_there_is_nothing_to_gain() -> None:
    with hosts([2]):
        found = _laws([2], "llama", LOSSLESS, 2)
    assert "all ranks share one node" in found.summary
    assert found.sent == [0, 0]


@pytest.mark.parametrize("kind", ["llama", "lora"])
@ranks(1, 1)
def test_bytes_between_hosts_are_those_of_what_is_trained(kind: str) -> None:
    """Each owner's part is sent once; uncompressed parts need no exchange of sizes."""
    found = _laws(ONE, kind, WHOLE, 3)
    assert found.sent == [found.owned] * 3


def _write(engine: Any) -> None:
    """One large parameter, and one that stays gathered, in each way that DeepSpeed has."""
    large = sorted(
        (p for p in engine.module.parameters() if p.requires_grad),
        key=lambda p: (-p.ds_numel, p.ds_id),
    )
    gathered, full, local, small = large[0], large[1], large[2], large[-1]
    with deepspeed.zero.GatheredParameters([gathered, small], modifier_rank=1):
        if dist.get_rank() == 1:
            gathered.data.mul_(1.5)
            small.data.add_(0.25)
    value = deepspeed.utils.safe_get_full_fp32_param(full)
    deepspeed.utils.safe_set_full_fp32_param(full, value * 1.5)
    value = safe_get_local_fp32_param(local)
    safe_set_local_fp32_param(local, value * (1.25 + dist.get_rank()))
    if frozen := [p for p in engine.module.parameters() if not p.requires_grad]:
        with deepspeed.zero.GatheredParameters(frozen[:2], modifier_rank=0):
            if dist.get_rank() == 0:
                frozen[0].data.mul_(0.5)


@pytest.mark.parametrize(
    ("slots", "kind", "section", "options"),
    [
        (ONE, "lora", LOSSLESS, {}),
        (ONE, "llama", WHOLE, FP32),
        (TWO, "llama", LOSSLESS, {"offload_optimizer": True}),
    ],
)
@pytest.mark.sampled(2)
@ranks()
def test_weights_that_the_user_writes_reach_every_node(slots, kind, section, options) -> None:
    """Plain DeepSpeed is the reference, for each of its ways to write weights."""

    def run(section: dict[str, Any]) -> Any:
        with _engine(kind, section, **options) as engine:
            losses = _train(engine, kind, 0, 2)
            before = _evaluate(engine, kind)
            _write(engine)
            evaluated = _evaluate(engine, kind)
            assert evaluated != before
            losses += _train(engine, kind, 2, 3)
            assert stale_copies(engine) == []
            losses += _train(engine, kind, 3, 4)
            return losses, before, evaluated, models.weights_digest(engine)

    assert run(section) == run({})


def _continued(engine: Any) -> tuple[Any, ...]:
    """Return the results of an engine that has made 2 of 4 steps."""
    evaluated = _evaluate(engine, "llama")
    return evaluated, _train(engine, "llama", 2, 4), models.weights_digest(engine)


def _straight(section: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """Train without a break, saving after 2 steps; results behind it, with a digest of the whole
    weights as DeepSpeed's two ways to them give them."""
    with _engine("llama", section) as engine:
        _train(engine, "llama", 0, 2)
        engine.save_checkpoint(str(folder))
        engine.save_16bit_model(str(folder / "whole"), "model.bin")
        dist.barrier()
        files = ""
        if dist.get_rank() == 0:
            sixteen = torch.load(folder / "whole" / "model.bin")
            fp32 = get_fp32_state_dict_from_zero_checkpoint(str(folder))
            files = digest(state[name] for state in (sixteen, fp32) for name in sorted(state))
        return files, *_continued(engine)


def _resumed(section: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """A run with other weights loads the checkpoint and goes on."""
    with _engine("llama", section) as engine:
        _train(engine, "llama", 50, 51)
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        assert stale_copies(engine) == []
        found = _continued(engine)
        assert stale_copies(engine) == []
        return found


@ranks(1, 1)
def test_a_checkpoint_goes_into_any_run(tmp_path: Path) -> None:
    """Resident weights or not: it loads; `zero_to_fp32`, `save_16bit_model` write the same."""
    plain = _straight({}, tmp_path / "plain")
    assert _straight(LOSSLESS, tmp_path / "ours") == plain
    for section, saved in ((LOSSLESS, "ours"), (LOSSLESS, "plain"), ({}, "ours")):
        assert _resumed(section, tmp_path / saved) == plain[1:]


@ranks(2, 2)
def test_a_checkpoint_goes_into_a_run_on_other_hosts(tmp_path: Path) -> None:
    expected = _straight(LOSSLESS, tmp_path)
    with hosts([1] * 4):
        assert _resumed(LOSSLESS, tmp_path) == expected[1:]


def _write_frozen(engine: Any) -> Tensor:
    frozen = next(p for p in engine.module.parameters() if not p.requires_grad)
    with deepspeed.zero.GatheredParameters([frozen], modifier_rank=0):
        frozen.data.mul_(1.5)
    return frozen


@ranks(1, 1)
def test_weights_loaded_into_a_running_engine_reach_every_node(tmp_path: Path) -> None:
    """Into a run whose weights have changed, frozen ones too: its own checkpoint, half of which a
    first load applies before it raises; then the state of its optimizer by hand."""

    def run(section: dict[str, Any]) -> Any:
        with _engine("lora", section) as engine:
            losses, evaluated = _train(engine, "lora", 0, 1), []
            folder = str(tmp_path / str(bool(section)))
            engine.save_checkpoint(folder)
            state = [copy.deepcopy(engine.optimizer.state_dict()) for _ in range(2)]
            frozen = _write_frozen(engine)
            losses += _train(engine, "lora", 1, 2)
            before, error = frozen.ds_tensor.detach().clone(), ValueError("no such optimizer")
            with patch.object(engine.optimizer, "load_state_dict", side_effect=error):
                with pytest.raises(ValueError, match="no such optimizer"):
                    engine.load_checkpoint(folder)
            assert not torch.equal(before, frozen.ds_tensor)
            evaluated.append(_evaluate(engine, "lora"))
            assert stale_copies(engine) == []
            _write_frozen(engine)
            for load, what in (
                (engine.load_checkpoint, folder),
                (engine.optimizer.load_state_dict, state),
            ):
                losses += _train(engine, "lora", 1, 2)
                load(what)
                assert stale_copies(engine) == []
                evaluated.append(_evaluate(engine, "lora"))
            losses += _train(engine, "lora", 2, 3)
            assert stale_copies(engine) == []
            return losses, evaluated, models.weights_digest(engine)

    assert run(LOSSLESS) == run({})


@ranks(1, 1)
def test_the_copy_follows_where_deepspeed_moves_weights(tmp_path: Path) -> None:
    """Weights and gradients leave the device between two steps and come back; saved where they
    are, and loaded after a step that goes elsewhere."""
    states = OffloadStateTypeEnum
    moving = [states.lp_params, states.lp_grads, states.contiguous_grad_buffer]

    def run(section: dict[str, Any]) -> Any:
        with _engine("llama", section) as engine:
            losses = _train(engine, "llama", 0, 2)
            engine.offload_states(include=moving)
            engine.save_checkpoint(str(tmp_path / str(bool(section))))
            engine.reload_states()
            assert stale_copies(engine) == []
            _train(engine, "llama", 3, 4)
            engine.load_checkpoint(str(tmp_path / str(bool(section))))
            losses += _train(engine, "llama", 2, 4)
            assert stale_copies(engine) == []
            digest = models.weights_digest(engine)
            assert not section or _follows(engine) == "elsewhere"
            return losses, digest

    assert run(LOSSLESS) == run({})


def _follows(engine: Any) -> Any:
    """Return the device of one parameter's copy after DeepSpeed has moved its shard. A stand-in
    replaces the second device. The engine is unusable afterwards."""
    param = next(engine.module.parameters())
    param.ds_tensor = SimpleNamespace(device="elsewhere")
    param.ds_secondary_tensor = SimpleNamespace(data=SimpleNamespace(to=lambda device: device))
    engine.offload_states(include=[])
    return param.ds_secondary_tensor.data


def _end(engine: Any, end: Callable[[], None]) -> None:
    """Check that `end` leaves no copy and no group."""
    params = list(engine.module.parameters())
    kept = [weakref.ref(p.ds_secondary_tensor) for p in params]
    inside = ds_ckpt.session_of(engine)._resident.groups[1]
    assert inside in _GROUPS
    end()
    gc.collect()
    assert not any(tensor() is not None for tensor in kept)
    assert inside not in _GROUPS
    assert not any(p.ds_zero_param_process_group is not None for p in params)


@ranks(1, 1)
def test_nothing_is_left_behind() -> None:
    """Detach, a step of plain DeepSpeed, attach again, destroy."""
    plain = _laws(ONE, "llama", {}, 5)
    with _engine("llama", LOSSLESS) as engine:
        losses = _train(engine, "llama", 0, 2)
        _end(engine, ds_ckpt.session_of(engine).detach)
        losses += _train(engine, "llama", 2, 3)
        ds_ckpt.attach(engine)
        assert stale_copies(engine) == []
        losses += _train(engine, "llama", 3, 4)
        assert stale_copies(engine) == []
        assert losses == plain.losses[:4]
        assert models.weights_digest(engine) == plain.weights[3]
        _end(engine, engine.destroy)
    assert not Init._partition.__module__.startswith("ds_ckpt")


@ranks(1, 1)
def test_a_set_up_that_fails_leaves_nothing() -> None:
    """Memory runs out while the copy is made; a step follows."""
    plain = _laws(ONE, "llama", {}, 5)
    with _engine("llama", LOSSLESS) as engine:
        ds_ckpt.session_of(engine).detach()
        before = len(_GROUPS)
        with patch.object(WeightsHook, "gather_anew", side_effect=MemoryError("out of memory")):
            with pytest.raises(MemoryError, match="out of memory"):
                ds_ckpt.attach(engine)
        params = engine.module.parameters()
        assert not any(p.ds_zero_param_process_group is not None for p in params)
        assert len(_GROUPS) == before
        assert _train(engine, "llama", 0, 1) == plain.losses[:1]


@ranks(1, 1, 1, 1)
def test_shards_of_another_engine_are_divided_anew() -> None:
    """DeepSpeed gives the group of one engine's `zero_hpz_partition_size` to all later ones."""
    with _engine("odd", {}, {"zero_hpz_partition_size": 2}):
        pass
    with _engine("odd", LOSSLESS, make_fresh=False) as engine:
        _train(engine, "odd", 0, 1)
        assert stale_copies(engine) == []
