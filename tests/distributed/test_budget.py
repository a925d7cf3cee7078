"""Budgets, planned for at the first batch, on real ZeRO-3 engines with two processes."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from ds_ckpt.activation.planning.costs import Rates
from ds_ckpt.engine import first_batch
from ds_ckpt.telemetry.memory import SavedActivations
from tests import architectures
from tests.distributed import models
from tests.distributed.pool import fresh, once, ranks
from tests.distributed.training import captured_log, of_all_ranks, refused, running
from tests.unit.offload_models import device_bytes

GIB = 2**30
SHARES = [0.55, 0.8, 2.0]
"""Budgets, as shares of the memory without recomputation."""
KINDS = [
    "llama",
    *(pytest.param(k, marks=pytest.mark.slow) for k in ("bart", "gpt2", "bert", "mixtral", "vit")),
]


def _batch(kind: str, seed: int, length: int) -> dict[str, Any]:
    if kind == "vit":
        return architectures.batch(kind, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, architectures.VOCAB, (2, length), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


@contextmanager
def _engine(kind: str, **options: Any) -> Iterator[Any]:
    fresh()
    with running(architectures.build(kind, 4, **options), reuse=0, lr=0.0) as engine:
        yield engine


def _train(engine, kind, activation, lengths, telemetry=None, uneven=0) -> Any:
    """One step for each length; process 1's sequences are longer by `uneven`."""
    section = {"activation": activation, "telemetry": telemetry or {}}
    engine._config._param_dict["ds_ckpt"] = section
    dp_rank = dist.get_rank()
    found = SimpleNamespace(gradients=[], held=[], on_device=[])
    with captured_log() as found.lines:
        session = ds_ckpt.attach(engine)
        try:
            for step, length in enumerate(lengths):
                torch.manual_seed(step + dp_rank)
                data = _batch(kind, 2 * step + dp_rank, length + uneven * dp_rank)
                with SavedActivations(engine.module) as measured:
                    loss = engine(**data).loss
                store = session._inputs.store if session._inputs else None
                found.on_device.append(device_bytes(store) if store else 0)
                found.held.append(measured.bytes)
                engine.backward(loss)
                found.gradients += models.gradients(engine)
                engine.step()
            found.plan, found.summary = session.activation_plan, session.summary
            found.moved = session.offload.out.total() if session.offload else 0
            hooks = len(engine.module._forward_pre_hooks)
        finally:
            session.detach()
    found.left_hooks = len(engine.module._forward_pre_hooks) - hooks
    return found


@contextmanager
def _accelerator(rates: Rates | None) -> Iterator[None]:
    """A CPU offloads nothing; let plans take it for an accelerator of these rates."""
    planning = first_batch.FirstBatchPlanning
    with ExitStack() as stack:
        if rates is not None:
            stack.enter_context(patch.object(first_batch, "measured_rates", return_value=rates))
            stack.enter_context(patch.object(planning, "_host_bytes", return_value=2**40))
        yield


@once
def _budgets(kind, shares, of="activations", rates=None, **extra) -> Any:
    """Return bytes held without recomputation; by share of them, planned and measured bytes."""
    results = {}
    with _accelerator(rates), _engine(kind) as engine:
        plain = _train(engine, kind, {}, [12, 12])
        assert plain.plan is None
        for share in shares:
            gib = share * max(plain.held) / GIB
            section = {"policy": "budget", "budget_gib": gib, "budget_of": of, **extra}
            ours = results[share] = _train(engine, kind, section, [12, 12])
            assert models.equal(plain.gradients, ours.gradients), (kind, share)
            assert ours.plan.needed_bytes <= gib * GIB
            ours.budget = gib * GIB
    return plain, results


@pytest.mark.parametrize("kind", KINDS)
@ranks(2, timeout=280)
def test_a_budget_is_kept_and_gradients_are_bitwise_those_of_no_checkpointing(kind: str) -> None:
    plain, results = _budgets(kind, SHARES)
    for ours in results.values():
        assert max(ours.held) <= ours.budget
        assert ours.plan.held_bytes == pytest.approx(max(ours.held), rel=0.03)
        assert ours.plan.none_bytes == pytest.approx(max(plain.held), rel=0.03)
        assert ours.left_hooks == -1
    small, middle, large = (results[share].plan for share in SHARES)
    assert set(large.choices) == {"none"} != set(small.choices)
    assert small.held_bytes < middle.held_bytes
    assert large.recompute_s == 0
    # one plan for all, to the last digit, in a line on one of them
    one, other = of_all_ranks([repr(ours.plan) for ours in results.values()])
    assert one == other
    described = results[SHARES[0]]
    assert bool(described.lines) == (dist.get_rank() == 0)
    for words in ("plan for", "without recompute", "recomputes"):
        assert all(words in line for line in described.lines[-1:])
    assert dist.get_rank() or "planned at the first training batch" in described.summary


@ranks(2, timeout=200)
def test_offloaded_inputs_are_not_on_the_device() -> None:
    _, results = _budgets("llama", [0.6], offload=True, offload_min_bytes=0)
    ours = results[0.6]
    # what boundaries keep is counted by the store, the rest where autograd saves it
    device = max(h + d for h, d in zip(ours.held, ours.on_device, strict=True))
    assert ours.plan.held_bytes == pytest.approx(device, rel=0.03)
    assert "in host memory" in " ".join(ours.lines) or ours.lines == []


@pytest.mark.slow
@pytest.mark.parametrize(("bus", "other"), [(0.7e9, "selective attention"), (1.35e9, "offload")])
@ranks(2, timeout=280)
def test_the_other_blocks_of_a_plan_are_offloaded_or_recomputed_by_the_bus(bus, other) -> None:
    """Some blocks keep their activations; gradients are those without a plan."""
    rates = Rates(1.1e10, 8.7e10, bus)
    ours = _budgets("bart", [0.6], rates=rates, offload_min_bytes=0)[1][0.6]
    assert set(ours.plan.choices) == {"none", other}
    assert (ours.moved > 0) == (other == "offload")
    device = max(h + d for h, d in zip(ours.held, ours.on_device, strict=True))
    assert ours.plan.held_bytes == pytest.approx(device, rel=0.03)
    assert device <= ours.budget


@ranks(2, timeout=200)
def test_a_budget_for_the_whole_accelerator_counts_what_zero_keeps() -> None:
    plan = _budgets("llama", [40.0], "accelerator")[1][40.0].plan
    assert plan.resident["weights, this rank's part"] > 0
    assert plan.resident["optimizer state"] > 0
    assert plan.resident["gradients, this rank's part"] > 0
    assert plan.resident["reduce bucket"] >= 5000 * 4
    assert plan.resident["gradients of activations and temporaries"] > 0
    assert plan.needed_bytes >= sum(plan.resident.values())


def _lengths(activation, lengths, share_of, uneven=0, telemetry=None) -> Any:
    """Sequences that change; the budget is 0.6 of what `share_of` tokens hold."""
    with _engine("llama", max_position_embeddings=128) as engine:
        gib = 0.6 * max(_train(engine, "llama", {}, [share_of]).held) / GIB
        plain = _train(engine, "llama", {}, lengths, uneven=uneven)
        section = {"budget_gib": gib, **activation}
        ours = _train(engine, "llama", section, lengths, telemetry, uneven)
    assert models.equal(plain.gradients, ours.gradients)
    one, other = of_all_ranks(repr(ours.plan))
    assert one == other
    ours.budget = gib * GIB
    return ours


@ranks(2, timeout=200)
def test_a_larger_batch_keeps_the_plan_and_is_reported_once(tmp_path: Path) -> None:
    telemetry = {"enabled": True, "every_n_steps": 100, "path": str(tmp_path / "t.jsonl")}
    ours = _lengths({"policy": "auto"}, [16, 32, 32, 16], 16, 0, telemetry)
    assert ours.plan.tokens == 32
    assert ours.held[0] <= ours.budget
    assert ours.held[0] == ours.held[3] < ours.held[1] == ours.held[2]
    (warning,) = [line for line in ours.lines if "larger than" in line]
    assert "a batch of 64 tokens is larger than the 32" in warning
    lines = (tmp_path / f"t.{dist.get_rank()}.jsonl").read_text().splitlines()
    (plan,) = [r["activation_plan"] for r in map(json.loads, lines) if "activation_plan" in r]
    assert plan["blocks"]
    assert plan["held_bytes"] == ours.plan.held_bytes


@ranks(2, timeout=200)
def test_the_process_with_the_largest_batch_decides() -> None:
    ours = _lengths({"policy": "budget"}, [24, 24], 32, uneven=8)
    assert ours.plan.tokens == 64
    first, second = of_all_ranks(ours.held[0])
    assert ours.plan.held_bytes == pytest.approx(second, rel=0.03)
    assert first < second <= ours.budget


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        (
            {"policy": "budget", "budget_gib": 1e-5},
            ["no plan fits", "budget_gib", "write at least 0.0000"],
        ),
        ({"policy": "auto", "budget_gib": 2**-17}, ["7.62939e-06 GiB for activations"]),
    ],
)
@ranks(2)
def test_an_impossible_budget_is_refused_on_every_rank(activation, words) -> None:
    with _engine("llama") as engine:
        plain = len(engine.module._forward_pre_hooks)
        with refused(*words):
            _train(engine, "llama", activation, [12])
        assert len(engine.module._forward_pre_hooks) == plain


@ranks(2, timeout=60)
def test_a_plan_that_fails_on_one_process_fails_on_all() -> None:
    is_first = dist.get_rank() == 0
    with _engine("llama", max_position_embeddings=128) as engine:
        gib = 0.6 * max(_train(engine, "llama", {}, [12]).held) / GIB
        section = {"activation": {"policy": "budget", "budget_gib": gib}}
        engine._config._param_dict["ds_ckpt"] = section
        planning = ds_ckpt.attach(engine)._planning
        if is_first:

            def fails(*args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("the search broke")

            planning._make = fails
        expected = RuntimeError if is_first else ds_ckpt.StateError
        with pytest.raises(expected, match="the search broke"):
            engine(**_batch("llama", 0, 12))
