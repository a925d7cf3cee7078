"""A step that does not end leaves nothing: neither twice-applied gradients nor lost residuals."""

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ds_ckpt
from tests.distributed import models
from tests.distributed.models import topk_section
from tests.distributed.pool import ranks
from tests.distributed.training import check_no_trace, outcome, running

SECTIONS: dict[str, dict[str, Any]] = {
    "topk": topk_section(topk={"density": 0.05}, min_numel=16),
    "powersgd": topk_section(
        method="powersgd", powersgd={"rank": 2}, min_numel=16, error_feedback={"dtype": "int8"}
    ),
}


def _micro_step(engine: Any, number: int) -> float:
    loss = engine(**models.batch("llama", number, dist.get_rank())).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _micro_steps(engine: Any, first: int, end: int) -> list[float]:
    return [_micro_step(engine, number) for number in range(first, end)]


def _interrupt(engine: Any) -> None:
    """A micro-step whose backward raises when most buckets are on their way or exchanged."""

    def stop(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("stop here")

    handle = engine.module.model.embed_tokens.weight.register_hook(stop)
    with pytest.raises(ValueError, match="stop here"):
        _micro_step(engine, 6)
    handle.remove()


def _repeat_in_backward(engine: Any) -> None:
    """GradCache's way, which ZeRO-3 refuses: a parameter would be twice in a bucket."""

    @torch.enable_grad()
    def hook(gradient: torch.Tensor) -> None:
        for _ in range(2):
            engine(**models.batch("llama", 6, dist.get_rank())).loss.backward()

    cached = torch.ones((), requires_grad=True) * 1
    cached.register_hook(hook)
    with pytest.raises(AssertionError):
        engine.backward(cached)


@pytest.mark.parametrize(
    ("breaks_off", "method", "accumulation", "options"),
    [
        (_interrupt, "topk", 1, {}),
        (_interrupt, "powersgd", 2, {}),
        (_interrupt, "topk", 2, {"bucket": 10**6}),
        (_repeat_in_backward, "topk", 1, {"bucket": 10**6}),
    ],
)
@pytest.mark.sampled(1)
@ranks(2)
def test_a_backward_that_raised_and_is_tried_again_leaves_no_trace(
    breaks_off: Any, method: str, accumulation: int, options: dict[str, int]
) -> None:
    check_no_trace(breaks_off, 2, SECTIONS[method], accumulation=accumulation, **options)


@pytest.mark.parametrize(("method", "bucket"), [("topk", 0), ("powersgd", 2)])
@ranks(2)
def test_a_failed_exchange_raises_and_leaves_no_trace(method: str, bucket: int) -> None:
    """One bucket's exchange raises on every rank."""

    def fail(engine: Any) -> None:
        exchange = ds_ckpt.session_of(engine).exchange.step
        choose, count, before = exchange.choose_reduction, itertools.count(), outcome(engine, [])

        def fail_once(*args: Any, **kwargs: Any) -> Any:
            reduction = choose(*args, **kwargs)

            def reduce(tensors: Any) -> Any:
                if next(count) == bucket:
                    raise ConnectionError("no link to host1")
                return reduction(tensors)

            return reduce

        with patch.object(exchange, "choose_reduction", fail_once):
            with pytest.raises(ConnectionError, match="no link to host1"):
                _micro_step(engine, 6)
        assert outcome(engine, []) == before

    check_no_trace(fail, 2, SECTIONS[method])


@pytest.mark.parametrize(("method", "what"), [("topk", "nan"), ("powersgd", "interrupted")])
@pytest.mark.sampled(1)
@ranks(2)
def test_a_checkpoint_loaded_amid_a_step_is_all_there_is(tmp_path, method, what) -> None:
    """The step's backward was interrupted, or its first micro-step brought a NaN."""
    with running("llama", SECTIONS[method], accumulation=2) as engine:
        _micro_steps(engine, 0, 4)
        engine.save_checkpoint(str(tmp_path))
        expected = outcome(engine, _micro_steps(engine, 4, 8))
        assert engine.skipped_steps == 0
    with running("llama", SECTIONS[method], accumulation=2) as engine:
        _micro_steps(engine, 0, 6)
        if what == "interrupted":
            _interrupt(engine)
        else:
            parameter = engine.module.model.norm.weight
            handle = parameter.register_hook(lambda g: torch.full_like(g, torch.nan))
            _micro_step(engine, 6)
            handle.remove()
        engine.load_checkpoint(str(tmp_path))
        engine.micro_steps = 4  # DeepSpeed counts on from where it was
        assert outcome(engine, _micro_steps(engine, 4, 8)) == expected


@ranks(2)
def test_an_interrupted_save_leaves_no_state_beside_an_earlier_saves_files(tmp_path: Path) -> None:
    """The DeepSpeed part of a second save under one tag fails."""
    with running("llama", SECTIONS["topk"]) as engine:
        _micro_step(engine, 0)
        engine.save_checkpoint(str(tmp_path), tag="t")
        _micro_step(engine, 1)
        full = OSError("no space left")
        with patch.object(engine, "_save_checkpoint", side_effect=full):
            with contextlib.suppress(OSError):
                engine.save_checkpoint(str(tmp_path), tag="t")
    with running("llama", SECTIONS["topk"]) as engine:
        engine.load_checkpoint(str(tmp_path), tag="t")
        assert engine.global_steps == 1
        assert len(ds_ckpt.session_of(engine).residuals) == 0


@ranks(2)
def test_a_refused_engine_leaves_no_process_group() -> None:
    with running("llama") as engine:
        groups = dist.distributed_c10d._world.pg_map
        before = len(groups)
        engine._config._param_dict["ds_ckpt"] = topk_section(exchange={"levels": 2})
        with pytest.raises(ds_ckpt.UnsupportedError, match="levels"):
            ds_ckpt.attach(engine)
        assert len(groups) == before
