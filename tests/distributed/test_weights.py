"""Resident weights on real ZeRO-3 engines, on ranks that act as several nodes."""

from importlib import metadata
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.engine import resident_weights
from ds_ckpt.engine.tuner import COUNTED_STEPS
from ds_ckpt.weights.changes import Lossless
from ds_ckpt.zero3 import compatibility
from ds_ckpt.zero3.resident import HOST_COPY, host_copy_bytes, resident_bytes
from tests.distributed import models
from tests.distributed.models import bits
from tests.distributed.pool import fresh, once, ranks
from tests.distributed.training import chunks_of, refused, resident_config, running

WHOLE = {"weights": {"resident": True, "deltas": "none"}}
LOSSLESS = {"weights": {"resident": True, "deltas": "lossless"}}
PLACED = {"weights": {"resident": "auto", "deltas": "none"}}
ONE, TWO = [1, 1], [2, 2]
FP32 = {"bf16": {"enabled": False}}
BLOCK = 1 + COUNTED_STEPS
SLOW = pytest.mark.slow
pytestmark = pytest.mark.skipif(
    compatibility._release(metadata.version("deepspeed"))
    < compatibility._release(compatibility.RESIDENT_SINCE),
    reason=f"refused before DeepSpeed {compatibility.RESIDENT_SINCE}",
)


def stale_copies(engine: Any) -> list[str]:
    """Return the parameters of which a host's copy is not, bit for bit, this process's part of what
    all owners have, with zeros behind it, once all that is under way is there."""
    session = ds_ckpt.session_of(engine)
    if session is None:
        return []
    session.drain()
    stale = []
    for name, param in engine.module.named_parameters():
        part, kept = param.ds_tensor.detach().flatten(), param.ds_secondary_tensor
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        whole = torch.cat(parts)
        whole[param.ds_numel :] = 0
        mine = dist.get_rank() % (whole.numel() // kept.numel())  # of the ranks of a host
        expected = whole[mine * kept.numel() : (mine + 1) * kept.numel()]
        right = torch.equal(bits(kept), bits(expected))
        if param.ds_status.name == "AVAILABLE":  # small ones are, and what is used again soon
            right &= torch.equal(bits(param.data), bits(whole[: param.ds_numel]))
        if not right:
            stale.append(name)
    return stale


@once
def _plain(kind: str, steps: int) -> tuple[list[float], str]:
    with running(kind, config=resident_config({})) as engine:
        return models.train(engine, kind, steps), models.weights_digest(engine)


@pytest.mark.parametrize(
    ("slots", "resident_s", "hpz"),
    [(ONE, 2.0, 1), pytest.param(ONE, 0.5, 1, marks=SLOW), pytest.param(TWO, 2.0, 2, marks=SLOW)],
    ids=["DeepSpeed is quicker", "resident is quicker", "hpZ is quicker"],
)
@ranks()
def test_weights_are_where_they_make_steps_shorter(tmp_path, resident_s, hpz) -> None:
    """The comparison changes no bit, all ranks agree, and a load compares anew."""
    is_resident, places = resident_s < 1, []
    with running("llama", config=resident_config(PLACED, hpz=hpz)) as engine:
        resident = ds_ckpt.session_of(engine)._resident
        hook, tuner = resident.hook, resident.tuner

        def seconds() -> float:
            places.append(hook.is_attached)
            return resident_s if hook.is_attached else 1.0

        models.set_clock(tuner, seconds)
        losses = models.train(engine, "llama", 2 * BLOCK + 2)
        assert not hook.is_attached or stale_copies(engine) == []
        assert places == [True] * BLOCK + [False] * BLOCK + [is_resident] * 2
        assert tuner.choice == ("uncompressed" if is_resident else "deepspeed")
        copies = [p.ds_secondary_tensor is not None for p in engine.module.parameters()]
        assert any(copies) == is_resident
        digest = models.weights_digest(engine)
        engine.save_checkpoint(str(tmp_path))
        engine.load_checkpoint(str(tmp_path))
        assert hook.is_attached
        models.train(engine, "llama", 1, first=len(losses))
    assert (losses, digest) == _plain("llama", 2 * BLOCK + 2)


@pytest.mark.parametrize("kind", ["llama", "lora"])  # lora: of a frozen weight
@ranks(1, 1)
def test_a_copy_that_went_wrong_is_found_and_healed(kind: str) -> None:
    """Something writes to one host's copy of the largest parameter."""
    with running(kind, config=resident_config(LOSSLESS)) as engine:
        models.train(engine, kind, 1)
        hook = ds_ckpt.session_of(engine)._resident.hook
        assert hook.check()
        if dist.get_rank() == 0:
            param = max(engine.module.parameters(), key=lambda p: p.ds_numel)
            param.ds_secondary_tensor.view(-1)[-1] += 1
        assert len(stale_copies(engine)) == (dist.get_rank() == 0)
        assert not hook.check()
        assert hook.check()
        assert stale_copies(engine) == []
        for piece in hook._chunks[0] if dist.get_rank() == 0 else ():
            piece.param.ds_secondary_tensor.zero_()
        hook._optimizer.fp32_partitioned_groups_flat[0].data.mul_(1.0003)
        hook._send()
        hook.drain()
        assert hook._is_wrong == (dist.get_rank() == 0)
        assert not hook.check()
        assert stale_copies(engine) == []


@ranks(1, 1)
def test_a_model_that_deepspeed_divides_while_it_is_built() -> None:
    results = []
    for section in ({}, LOSSLESS):
        fresh()
        config = resident_config(section)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = models.build("llama")
        with running(model, config=config) as engine:
            results.append((models.train(engine, "llama", 3), models.weights_digest(engine)))
            assert not section or stale_copies(engine) == []
    assert results[0] == results[1]


def _of_one_zero_init(kind, sections, end, **options) -> tuple[list[list[float]], list[str]]:
    """Two models that DeepSpeed divides together, each with its section. The first one ends in a
    way while both train on, or neither; weights of the second are written."""
    fresh()
    with deepspeed.zero.Init(config_dict_or_path=resident_config({}, **options)):
        two = [models.build(kind) for _ in sections]
    engines = [
        models.start(model, resident_config(section, **options))
        for model, section in zip(two, sections, strict=True)
    ]
    losses = [models.train(engine, kind, 2) for engine in engines]
    if end == "destroy":
        engines.pop(0).destroy()
    elif end == "detach" and sections[0]:
        ds_ckpt.session_of(engines[0]).detach()
    param = max(engines[-1].module.parameters(), key=lambda p: p.ds_numel)
    with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
        if dist.get_rank() == 0:
            param.data.mul_(1.5)
    assert not sections[-1] or stale_copies(engines[-1]) == []
    losses += [models.train(engine, kind, 2, first=2) for engine in engines]
    digests = [models.weights_digest(engine) for engine in engines]
    for engine in engines:
        engine.destroy()
    return losses, digests


@pytest.mark.parametrize(
    ("slots", "kind", "sections", "end", "options"),
    [
        (ONE, "llama", [LOSSLESS, LOSSLESS], "destroy", {}),
        (ONE, "plain", [WHOLE, {}], "", FP32),
        (ONE, "plain", [WHOLE, WHOLE], "detach", {**FP32, "reuse": 0}),
        (TWO, "plain", [{}, WHOLE], "", FP32),
    ],
)
@pytest.mark.sampled(2)
@ranks()
def test_two_models_divided_together_are_each_their_own(kind, sections, end, options) -> None:
    ours = _of_one_zero_init(kind, sections, end, **options)
    assert ours == _of_one_zero_init(kind, [{}, {}], end, **options)


def _gathered_together(sections, order, written) -> tuple[list[list[float]], list[str]]:
    """Engines `a` and `b`, made in that order; all weights of both are gathered in one context, a
    before b, and those of one are moved half the way to the other's."""
    fresh()
    with chunks_of(200):
        engines = {name: models.start("llama", resident_config(sections[name])) for name in order}
        a, b = engines["a"], engines["b"]
        losses = [models.train(a, "llama", 2), models.train(b, "llama", 1)]
        both = [list(engine.module.parameters()) for engine in (a, b)]
        to, source = both if written == "a" else reversed(both)
        with deepspeed.zero.GatheredParameters([*both[0], *both[1]], modifier_rank=0):
            if dist.get_rank() == 0:
                for param, other in zip(to, source, strict=True):
                    param.data.lerp_(other.data, 0.5)
        stale = [stale_copies(engines[name]) for name in "ab" if sections[name]]
        assert not any(stale)
        losses += [models.train(engine, "llama", 2, first=2) for engine in (a, b)]
        digests = [models.weights_digest(engine) for engine in (a, b)]
        for engine in (a, b):
            engine.destroy()
    return losses, digests


@pytest.mark.parametrize(
    ("a", "b", "order", "written"), [(LOSSLESS, {}, "ba", "a"), (WHOLE, WHOLE, "ab", "b")]
)
@pytest.mark.sampled(1)
@ranks(1, 1, timeout=90)
def test_weights_of_two_models_are_written_together(a, b, order, written) -> None:
    """A program that moves a teacher's weights does this."""
    plain = _gathered_together({"a": {}, "b": {}}, order, written)
    assert _gathered_together({"a": a, "b": b}, order, written) == plain


@pytest.mark.parametrize(
    ("slots", "kind", "section", "options"),
    [
        (TWO, "lora", LOSSLESS, {}),
        pytest.param(TWO, "plain", WHOLE, FP32, marks=SLOW),
        (TWO, "llama", {}, {"hpz": 2}),
        pytest.param(TWO, "llama", LOSSLESS, {"hpz": 2}, marks=SLOW),
        ([1] * 4, "plain", WHOLE, FP32),
        (TWO, "llama", {}, {}),
    ],
    ids=["frozen", "fp32", "hpz alone", "hpz", "4 hosts", "no copy"],
)
@pytest.mark.sampled(2)
@ranks()
def test_a_budget_counts_what_a_host_keeps(slots, kind, section, options) -> None:
    """The node's copy counts before the first batch, in the plan, and between steps."""
    activation: dict[str, Any] = {"policy": "budget", "budget_gib": 1.0, "budget_of": "accelerator"}
    if kind in models.PLAIN:
        activation["modules"] = [models.PLAIN[kind]]
    config = resident_config({**section, "activation": activation}, **options)
    with running(kind, config=config) as engine:
        session, parameters = ds_ckpt.session_of(engine), list(engine.module.parameters())
        counts, (itemsize,) = [p.ds_numel for p in parameters], {p.itemsize for p in parameters}
        formula = host_copy_bytes(counts, sum(slots), slots[0], itemsize)
        assert 1 <= formula * slots[0] / (sum(counts) * itemsize) < 1.1  # padding
        expected = formula if section or options else 0
        copies = [p.ds_secondary_tensor for p in parameters if p.ds_secondary_tensor is not None]
        assert sum(tensor.nbytes for tensor in copies) == expected
        assert bool(session._resident) == bool(section)
        assert not section or session._resident.hook.nbytes == expected
        models.train(engine, kind, 1)
        assert session.activation_plan.resident.get(HOST_COPY, 0) == expected
        assert resident_bytes(engine, []).get(HOST_COPY, 0) == expected


@ranks(1, 1)
def test_a_copy_that_one_process_has_no_room_for_is_made_by_none() -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(resident_weights, "free_on", lambda device: 1)
        _refused({}, ["$.ds_ckpt.weights.resident", "more than are free"])


@ranks(1, 1)
def test_changes_that_one_process_cannot_code_are_coded_by_none() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident_weights, "on_host", lambda device: False)
        if dist.get_rank() == 1:
            patch.setattr(Lossless, "encode", lambda *_: torch.zeros(()).view(2))
        with (
            refused("invalid for input of size", kind=Exception),
            running("llama", config=resident_config(LOSSLESS)),
        ):
            pass


@pytest.mark.parametrize(
    ("slots", "options", "words"),
    [
        (
            ONE,
            {"hpz": 2},
            ["$.zero_optimization.zero_hpz_partition_size", "write 1, or remove that key"],
        ),
        (ONE, FP32, ["torch.float32"]),
        ([1, 3], {}, ["$.ds_ckpt.weights.resident", "unequal numbers of ranks (1, 3)"]),
    ],
)
@ranks()
def test_unsupported_settings_are_refused(options: dict[str, Any], words: list[str]) -> None:
    _refused(options, words)


def _refused(options: dict[str, Any], words: list[str]) -> None:
    config = resident_config(LOSSLESS, **options)
    with refused(*words), running("llama", config=config):
        pass
