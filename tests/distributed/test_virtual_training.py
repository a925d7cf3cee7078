"""Two virtual workers in one process against two real ZeRO-3 processes: the same numbers."""

import functools
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch

import ds_ckpt
from ds_ckpt.config import parse
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.lab.validate.world import InProcessWorld, Recipe
from ds_ckpt.telemetry import Purpose
from tests.distributed import models
from tests.distributed.models import quantize_section, topk_section
from tests.distributed.training import largest_gap, running

LR = 1e-3
STEPS = 12
WARM_UP = {"topk": {"density": 0.05}, "warmup_steps": 3}
ONE_BIT: dict[str, Any] = {"method": "entropy_coded"}
PLAIN, CLIPPED_AND_ACCUMULATED = (0.0, 1), (0.5, 2)
CASES: dict[str, tuple[dict[str, Any], tuple[float, int]]] = {
    "dense": ({"compression": {"method": "dense"}}, CLIPPED_AND_ACCUMULATED),
    "topk": (topk_section(**WARM_UP), CLIPPED_AND_ACCUMULATED),
    "momentum": (topk_section(**WARM_UP, error_feedback={"momentum": 0.3}), PLAIN),
    "bf16 residuals": (topk_section(**WARM_UP, error_feedback={"dtype": "bf16"}), PLAIN),
    "1 bit by energy": (topk_section(**ONE_BIT, entropy_coded={"metric": "energy"}), PLAIN),
    "1 bit in steps": (topk_section(**ONE_BIT, entropy_coded={"metric": "steps"}), PLAIN),
    "1 bit after 4 bits": (
        topk_section(**ONE_BIT, warmup_steps=3, warmup_bits=4), CLIPPED_AND_ACCUMULATED
    ),
    "quantize": (quantize_section(), PLAIN),
    "2 bits without feedback": (
        quantize_section(quantize={"bits": 2}, error_feedback={"enabled": False}),
        CLIPPED_AND_ACCUMULATED,
    ),
    "powersgd": (topk_section(method="powersgd", powersgd={"rank": 2}), CLIPPED_AND_ACCUMULATED),
}  # fmt: skip

OFTEN = ("topk", "1 bit after 4 bits", "powersgd")

LOSS_TOLERANCE = 5e-6
"""Ten times the spacing of fp32 numbers at these losses. DeepSpeed runs AdamW on flat shards, we on
whole tensors: weights differ in their last bits, and sums over them in theirs."""
WEIGHT_TOLERANCE = 1e-5
"""A hundredth of the learning rate. Where rounding tips a code or a selected entry over, one weight
moves by up to the learning rate; so at most one weight in a hundred may be further off."""
LONGEST_STEP = 3.2
"""AdamW's, over its rate: (1 - b1) / sqrt(1 - b2). An entry at a threshold, which a CPU that rounds
otherwise sends a step later, may be off by it."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread like the pool's workers, so that matmuls sum in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _real(section: dict[str, Any], clip: float, accumulation: int) -> dict[str, Any]:
    """Losses of this process, bytes sent for gradients, and all weights at the end."""
    options = {"lr": LR, "clip": clip, "accumulation": accumulation}
    with running("llama", section, **options) as engine:
        losses = models.train(engine, "llama", STEPS)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        sent = ds_ckpt.session_of(engine).counters.bytes_sent[Purpose.REDUCE]
    return {"losses": losses, "weights": weights, "sent": sent}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in CASES]
)
def test_virtual_workers_give_the_numbers_of_real_processes(world2: Any, name: str) -> None:
    section, (clip, accumulation) = CASES[name]
    chooses_entries = section["compression"]["method"] in ("topk", "entropy_coded")
    real = world2.run(_real, section, clip, accumulation)
    losses, weights, sent = _virtual(name, clip, accumulation)
    for worker, process in enumerate(real):
        assert losses[worker] == pytest.approx(process["losses"], abs=LOSS_TOLERANCE, rel=0)
        off = torch.cat([(process["weights"][n] - w).abs().flatten() for n, w in weights.items()])
        assert float(off.max()) < (LONGEST_STEP if chooses_entries else 1) * LR
        assert float((off > WEIGHT_TOLERANCE).float().mean()) < 0.01
        if not section["compression"].get("warmup_steps"):
            # DeepSpeed's small buckets have more headers and ends to fill up
            assert 0.93 * process["sent"] < sent <= process["sent"]
    if name != "dense":
        dense, _, _ = _virtual("dense", clip, accumulation)
        assert largest_gap(losses[0], dense[0]) > 20 * LOSS_TOLERANCE


class ConstantRate(Recipe):
    def rate(self, step: int) -> float:
        return self.learning_rate


@functools.cache
def _virtual(name, clip, accumulation) -> tuple[list[list[float]], dict[str, torch.Tensor], int]:
    """Return losses of all micro-steps by worker, weights at the end, and a worker's bytes sent."""
    model = models.build("llama").train()
    for module in model.modules():
        # As DeepSpeed's: autograd then adds up what comes back into a block in the same order.
        module.register_full_backward_hook(lambda *_: None)

    def loss(step: int, micro: int, worker: int) -> torch.Tensor:
        data = models.batch("llama", step * accumulation + micro, worker)
        return models.loss_of(model(**data))

    settings = exchange_settings(parse(models.zero3_config(ds_ckpt=CASES[name][0])).compression)
    recipe = ConstantRate(STEPS, LR, (0.9, 0.999), clip=clip)
    world = InProcessWorld(model, loss, recipe, settings, workers=2, accumulation=accumulation)
    reports = [world.train_step() for _ in range(STEPS)]
    losses = [[x for report in reports for x in report.losses[worker::2]] for worker in range(2)]
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return losses, weights, world.workers.sent_bytes
