"""A run of a comparison: its outcome, and the same outcome after an interruption."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.rules import MethodSettings
from ds_ckpt.validation.data import Text
from ds_ckpt.validation.task import Learner, small_llama
from ds_ckpt.validation.trainer import Outcome, Saving, train
from ds_ckpt.validation.virtual_workers import DENSE_SETTINGS as DENSE
from ds_ckpt.validation.virtual_workers import sixteen_bit_step_bytes
from ds_ckpt.validation.world import InProcessWorld, Recipe
from ds_ckpt.workload import Corpus

pytest.importorskip("transformers")
TEXT = Corpus("made up", train=b"abcdefgh" * 100, heldout=b"abcdefgh" * 20)
SMALL = small_llama(length=16, hidden_size=16, layers=1, intermediate_size=24, heads=2)
TOPK = ExchangeSettings(MethodSettings("topk", density=0.1), warmup_steps=4, min_numel=0)
RECIPE = Recipe(steps=12, learning_rate=1e-2)


class _InterruptionError(Exception):
    pass


def begun(settings: ExchangeSettings) -> tuple[Learner, InProcessWorld]:
    learner = Learner(Text.of_bytes(TEXT, 16, 2), SMALL, batch=2)
    learner.begin(5)
    return learner, InProcessWorld(learner.model, learner.loss, RECIPE, settings, workers=2)


def trained(
    folder: Path,
    settings: ExchangeSettings,
    *,
    name: str = "run",
    stop_at: int | None = None,
    keep_after: frozenset[int] = frozenset(),
) -> Outcome:
    def progress(done: int, loss: float) -> None:
        if done == stop_at:
            raise _InterruptionError

    return train(
        *begun(settings),
        RECIPE.steps,
        warm_up=settings.warmup_steps,
        saving=Saving(folder, name, "dense", every=5, keep_after=keep_after),
        evaluate_every=6,
        evaluate_first=False,
        progress=progress,
    )


def numbers(outcome: Outcome) -> dict[str, Any]:
    """All of it but the clock."""
    kept = dataclasses.asdict(outcome)
    return {k: v for k, v in kept.items() if not k.endswith("cpu_s")}


def test_an_interrupted_run_comes_to_the_same(tmp_path: Path) -> None:
    straight = trained(tmp_path / "a", TOPK)
    with pytest.raises(_InterruptionError):
        trained(tmp_path / "b", TOPK, stop_at=10)
    assert (tmp_path / "b" / "run.partial.pt").exists()
    resumed = trained(tmp_path / "b", TOPK)
    assert numbers(straight) == numbers(resumed)
    assert not list((tmp_path / "b").glob("*.partial.pt"))
    assert [step for step, _ in straight.heldout] == [6, 12]
    assert straight.heldout[-1][1] < straight.heldout[0][1]
    assert straight.warm_up_bytes > 2 * straight.step_bytes > 0
    assert straight.residual_norm > 0


@pytest.mark.parametrize("then", [{"torch": "1.0"}, None], ids=["others", "unknown"])
def test_a_state_of_other_packages_is_not_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: dict[str, str] | None
) -> None:
    with pytest.raises(_InterruptionError):
        trained(tmp_path, TOPK, stop_at=10)
    path = tmp_path / "run.partial.pt"
    state = torch.load(path, weights_only=True)
    assert state.pop("versions")["torch"] == version("torch")
    state["log"]["losses"] = [0.0] * 10  # what would be seen of it in the outcome
    torch.save(state | ({"versions": then} if then else {}), path)
    with pytest.raises(_InterruptionError):  # it comes past step 10 again
        trained(tmp_path, TOPK, stop_at=10)
    (said,) = caplog.messages
    assert str(path) in said
    assert "begins anew" in said
    assert ("torch 1.0" if then else "unknown versions") in said
    caplog.clear()
    resumed = trained(tmp_path, TOPK)
    assert numbers(resumed) == numbers(trained(tmp_path / "straight", TOPK))
    assert not caplog.messages


def test_a_shared_warm_up_changes_nothing(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", TOPK)
    dense = trained(tmp_path / "shared", DENSE, name="dense run", keep_after=frozenset({4}))
    assert (tmp_path / "shared" / "dense.after-4.pt").exists()
    assert numbers(trained(tmp_path / "shared", TOPK)) == numbers(alone)
    assert dense.heldout != alone.heldout


def test_a_run_that_diverges_is_stopped() -> None:
    learner, world = begun(TOPK)
    with torch.no_grad():
        next(learner.model.parameters()).fill_(torch.nan)
    outcome = train(learner, world, RECIPE.steps, evaluate_first=False)
    assert outcome.diverged
    assert outcome.heldout == []


@pytest.mark.parametrize("world", [2, 4])
def test_sixteen_bit_bytes(world: int) -> None:
    shapes = [("a", torch.Size([64, 64])), ("b", torch.Size([64]))]
    dense = sixteen_bit_step_bytes(DENSE, shapes, world)
    share = (world - 1) / world
    assert dense == pytest.approx(2 * (64 * 64 + 64) * share + 8 * (world - 1), rel=0.01)
    four = ExchangeSettings(MethodSettings("quantize", bits=4), warmup_steps=9, min_numel=0)
    expected = 64 * 64 * 4.25 / 8 * share + 128 * share + 8 * (world - 1)
    assert sixteen_bit_step_bytes(four, shapes, world) == pytest.approx(expected, rel=0.02)


def test_accumulated_steps_send_less_often_only_where_they_wait() -> None:
    shapes = [("w", torch.Size((64, 64)))]
    four = ExchangeSettings(MethodSettings("quantize", bits=4), min_numel=0)
    each = dataclasses.replace(four, when="micro_step")
    once, dense = (sixteen_bit_step_bytes(s, shapes, 2) for s in (four, DENSE))
    assert sixteen_bit_step_bytes(DENSE, shapes, 2, accumulation=3) == 3 * dense
    assert sixteen_bit_step_bytes(four, shapes, 2, accumulation=3) == once
    assert sixteen_bit_step_bytes(each, shapes, 2, accumulation=3) == 3 * once
