"""Exchanges beside backward: the same bits, no waiting for each other, a clean end."""

from __future__ import annotations

from typing import Any

import pytest

from ds_ckpt.telemetry import Purpose
from tests.distributed import cases_overlap as cases
from tests.distributed.models import quantize_section, topk_section

DENSE: dict[str, Any] = {"compression": {"method": "dense"}}
TOPK = topk_section(topk={"density": 0.05})
METHODS = {
    "dense": DENSE,
    "topk": TOPK,
    "quantize": quantize_section(),
    "powersgd": topk_section(method="powersgd", powersgd={"rank": 2}),
}
LATE_S = (0.02, 0.0, 0.005)
"""So late that backward has written the next bucket's gradients, and not always the same."""


def _equal(process: dict[str, Any]) -> None:
    assert process["off"] == process["on"]
    assert process["off threads"] == {"MainThread"}
    (thread,) = process["on threads"]
    assert thread.startswith("exchange of")
    assert process["on buckets"] == process["off buckets"]
    assert process["on left"] == []
    reduce_s, exposed_s = process["off seconds"]
    assert reduce_s == exposed_s > 0
    assert min(process["on seconds"]) > 0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dense", {"clip": 0.1}),
        ("powersgd", {"clip": 0.1}),
        ("topk", {"accumulation": 3, "clip": 1.0}),
        ("quantize", {"offload_optimizer": True, "accumulation": 2, "clip": 0.1}),
        ("topk", {"bucket": 500_000_000}),
        ("powersgd", {"bucket": 300, "accumulation": 2}),
    ],
    ids=str,
)
def test_the_same_bits_with_two_processes(
    world2: Any, method: str, options: dict[str, Any]
) -> None:
    for process in world2.run(
        cases.same_either_way, "llama", METHODS[method], 4, LATE_S, **options
    ):
        _equal(process)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("topk", {"accumulation": 3, "clip": 1.0}),
        ("powersgd", {"offload_optimizer": True, "accumulation": 2, "clip": 0.1}),
    ],
    ids=str,
)
def test_and_with_four(world4: Any, method: str, options: dict[str, Any]) -> None:
    for process in world4.run(
        cases.same_either_way, "plain", METHODS[method], 4, LATE_S, bucket=1000, **options
    ):
        _equal(process)


def test_a_block_used_three_times_and_sixteen_bits(world2: Any) -> None:
    for kind, options in (("shared", {"bucket": 500}), ("llama", {"bf16": {"enabled": True}})):
        for process in world2.run(cases.same_either_way, kind, TOPK, 4, LATE_S, **options):
            _equal(process)


def test_other_loops_come_to_the_same(world2: Any) -> None:
    for process in world2.run(cases.odd_loops, TOPK):
        assert process["off"] == process["on"]
        assert process["off refused"]
        assert process["on refused"]


@pytest.mark.parametrize("policy", ["none", "block"])
def test_gathers_pass_an_exchange_and_the_norm_waits_for_it(world2: Any, policy: str) -> None:
    section = {**TOPK, "activation": {"policy": policy}}
    for process in world2.run(cases.goes_on, section):
        assert process["gather"], "backward stood still until the exchange had ended"
        assert process["seconds"] == (1.0, 0.0), "reduced in, of them exposed"
        assert process["buckets"] > 6
        assert process["peak"] == process["limit"] == 2
        assert process["spares"] <= 2
        assert process["before norm"] == [0, 0]


def test_bytes_are_counted_as_reduction_in_any_thread(world2: Any) -> None:
    for process in world2.run(cases.same_either_way, "llama", TOPK, 2, ()):
        sent = process["on"]["sent"]
        assert sent == process["off"]["sent"]
        assert sent[Purpose.REDUCE] > 0


def test_deepspeeds_own_reduction_stays_in_its_thread(world2: Any) -> None:
    section = topk_section(topk={"density": 0.05}, warmup_steps=2)
    for process in world2.run(cases.stock_runs_in_the_main_thread, section):
        assert process["stock"] == {"MainThread"}
        (thread,) = process["exchange"]
        assert thread.startswith("exchange of")


@pytest.mark.parametrize(("bucket", "overlaps"), [(0, True), (2, False), (6, True)])
def test_a_failed_exchange_is_told_where_deepspeed_runs(
    world2: Any, bucket: int, overlaps: bool
) -> None:
    for process in world2.run(cases.failing_exchange, TOPK, bucket, overlaps):
        assert process["message"] == "no link to host1"
        assert "_no_link" in process["trace"]
        assert process["weights kept"]
        assert process["residuals kept"]
        assert process["pending"] == []
        assert process["losses"] == process["expected"]
        assert process["left"] == []


@pytest.mark.parametrize(
    ("method", "parameter"),
    [
        ("dense", "model.embed_tokens.weight"),
        ("topk", "model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_after_an_interrupted_backward_it_is_as_without_overlap(
    world2: Any, method: str, parameter: str
) -> None:
    for process in world2.run(cases.interrupted_backward, METHODS[method], parameter):
        assert process["off raised"]
        assert process["on raised"]
        assert process["off"] == process["on"]
        assert process["on left"] == []


@pytest.mark.parametrize("how", ["destroy", "detach"])
def test_an_end_in_flight_leaves_no_thread(world2: Any, how: str) -> None:
    for process in world2.run(cases.ends_in_flight, TOPK, how, timeout=60):
        assert process["message"] == "stop here"
        assert process["flying"] > 0
        assert process["took_s"] < 5
        assert process["left"] == []


def test_the_end_of_one_process_frees_the_other(world2: Any) -> None:
    waiting, gone = world2.run(cases.ends_in_flight, TOPK, "destroy alone", timeout=60)
    assert gone["message"] == "stop here"
    assert gone["flying"] == 0
    # gloo's word for it depends on what the other end had left unread
    assert "closed" in waiting["message"] or "reset" in waiting["message"]
    for process in (waiting, gone):
        assert process["took_s"] < 5
        assert process["left"] == []


def test_a_dropped_engine_takes_its_thread_along(world2: Any) -> None:
    for process in world2.run(cases.dropped_engine, TOPK):
        assert len(process["running"]) == 1
        assert process["left"] == []
