"""Engines that train, shared by the tests that run in the workers."""

import copy
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_ckpt
from ds_ckpt.exchange.layout import LocalShard, ShardLayout
from ds_ckpt.telemetry import Purpose
from ds_ckpt.weights import changes, transfer
from ds_ckpt.zero3.parameters import shapes_of
from tests.distributed import models
from tests.distributed.pool import fresh, once

DENSE = {"compression": {"method": "dense"}}


@contextmanager
def running(model, section=None, *, config=None, **options) -> Iterator[Any]:
    """An engine of a model, or of a kind of `models` in a process made fresh.

    Without a section it is plain DeepSpeed. `config` is in place of one made of section and
    options, which are those of `models.zero3_config`.
    """
    if isinstance(model, str):
        fresh()
    sections = {"ds_ckpt": section} if section else {}
    engine = models.start(model, config or models.zero3_config(**sections, **options))
    try:
        yield engine
    finally:
        engine.destroy()


def resident_config(section, *, persistence=40, hpz=1, **options) -> dict[str, Any]:
    """A configuration in bf16 in which biases and norms stay gathered."""
    sections = {"ds_ckpt": section} if section else {}
    config = models.zero3_config(**{"bf16": {"enabled": True}, "clip": 1.0, **sections, **options})
    config["zero_optimization"] |= {
        "stage3_param_persistence_threshold": persistence,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_hpz_partition_size": hpz,
    }
    return config


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect what this rank logs, from level INFO on."""
    lines: list[str] = []
    capture, log = logging.Handler(), logging.getLogger("ds_ckpt")
    capture.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(capture)
    try:
        yield lines
    finally:
        log.removeHandler(capture)
        log.setLevel(level)


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """DeepSpeed refuses fp16 on CPUs because it is slow there; torch computes it all the same."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Chunks of about so many elements, of which two are under way at a time."""
    with patch.object(changes, "CHUNK", size), patch.object(transfer, "IN_FLIGHT", 2):
        yield


@contextmanager
def refused(*words: str, kind: type[Exception] = ds_ckpt.DsCkptError) -> Iterator[Any]:
    """An error with these words is raised inside."""
    with pytest.raises(kind) as error:
        yield error
    assert [word for word in words if word not in str(error.value)] == []


def convert(folder: Path, tag: str) -> Path:
    """Convert the checkpoint `tag` of `folder` by DeepSpeed's program, as a user runs it."""
    universal = folder / f"{tag}_universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(folder / tag), "--output_folder", str(universal)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return universal


def of_all_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_0(act: Callable[[], Any]) -> None:
    """One rank acts, for instance on a file of all, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def unsent(engine: Any) -> dict[str, torch.Tensor]:
    """Residuals summed over processes, at their places in the flattened parameters (fp64)."""
    session, world, me = ds_ckpt.session_of(engine), dist.get_world_size(), dist.get_rank()
    if session is None:
        return {}
    columns = session.exchange.groups.peers or (tuple(range(world)),)
    members = next(column for column in columns if me in column)
    shapes = {name: shape for name, shape, _ in shapes_of(engine)}
    sums = {}
    for name, residual in sorted(session.residuals.items()):
        numel = shapes[name].numel()
        layout = LocalShard(ShardLayout(numel, world), members)
        sums[name] = torch.zeros(numel, dtype=torch.float64)
        for member in range(len(members)):
            sums[name][layout.source(member)] = residual[layout.shard(member)].double()
        dist.all_reduce(sums[name])
    return sums


def state_digest(engine: Any) -> str:
    """The names and one digest of this process's residuals and factors as they are kept."""
    built = ds_ckpt.session_of(engine).exchange
    stored, factors = built.feedback.stored(), built.step.exchange.factors.state_dict()
    tensors = [t for name in sorted(stored) for t in stored[name].tensors]
    tensors += [factors[key] for key in sorted(factors)]
    about = built.feedback.steps, sorted(stored), sorted(factors)
    return f"{about} {models.digest(tensors)}"


def outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Return what equal runs have in common: losses, weights and the state between steps."""
    factors = ds_ckpt.session_of(engine).exchange.step.exchange.factors.state_dict()
    return {
        "losses": losses,
        "weights": models.weights_digest(engine),
        "state": state_digest(engine),
        "factors": len(factors),
    }


@once(when=lambda kind, section, *_, **__: section in ({}, DENSE))
def trained(kind: str, section: dict[str, Any], steps: int, **options: Any) -> Any:
    """Train; losses, weights and what was sent. Runs of plain DeepSpeed and dense ones are kept."""
    with running(kind, section, **options) as engine:
        session, losses = ds_ckpt.session_of(engine), models.train(engine, kind, steps)
        return SimpleNamespace(
            losses=losses,
            weights=models.weights_digest(engine),
            active=session is not None,
            sent=session.counters.bytes_sent[Purpose.REDUCE] if session else 0,
            collectives=session.counters.collectives[Purpose.REDUCE] if session else 0,
            residuals=dict(session.residuals) if session else {},
            skipped=engine.skipped_steps,
        )


def largest_gap(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def conservation(kind, section, steps, accumulation=1, levels=1) -> tuple[float, int]:
    """Law 3: the worst gap, relative, of what the ranks put in against what the owners took out
    and what is left; and the number of tensors of which something is left.

    A twin engine without the plugin, fed the same weights' gradients, gives what went in: at
    lr 0 the weights never move, so both see the same gradients at every step.
    """
    taken, left, found = _sums(kind, section, steps, accumulation)
    assert found == levels
    worst = 0.0
    for name, total in _default_sums(kind, {}, steps, accumulation)[0].items():
        gap = (taken[name] + left.get(name, torch.zeros_like(total)) - total).abs().max().item()
        worst = max(worst, gap / (total.abs().max().item() + 1e-12))
    return worst, sum(bool(total.any()) for total in left.values())


def _sums(
    kind: str, section: dict[str, Any], steps: int, accumulation: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Return by parameter what the owners took out in all steps, and what is left; levels."""
    taken: dict[str, torch.Tensor] = {}
    with running(kind, section, lr=0.0, accumulation=accumulation) as engine:
        for micro in range(steps * accumulation):
            torch.manual_seed(micro + dist.get_rank())
            data = models.batch(kind, micro, dist.get_rank())
            engine.backward(models.loss_of(engine(**data)))
            if engine.is_gradient_accumulation_boundary():
                for name, gradient in _full_gradients(engine).items():
                    taken[name] = taken.get(name, 0) + gradient.double()
            engine.step()
        session = ds_ckpt.session_of(engine)
        has_two = session is not None and session.exchange.groups.inside is not None
        return taken, unsent(engine), 1 + has_two


_default_sums = once(_sums)


def _full_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The averaged gradient of every parameter, flat, put together from the owners' parts."""
    names = {p.ds_id: n for n, p in engine.module.named_parameters()}
    optimizer, world, me = engine.optimizer, dist.get_world_size(), dist.get_rank()
    full = {}
    for index, group in enumerate(optimizer.fp16_groups):
        for parameter, part in zip(group, optimizer.averaged_gradients[index], strict=True):
            if not parameter.requires_grad:
                continue
            chunk = math.ceil(parameter.ds_numel / world)
            whole = torch.zeros(chunk * world)
            real = max(0, min(chunk, parameter.ds_numel - me * chunk))
            whole[me * chunk : me * chunk + real] = part.flatten()[:real]
            dist.all_reduce(whole)
            full[names[parameter.ds_id]] = whole[: parameter.ds_numel]
    return full


def check_non_finite(section, value, where, **options) -> None:
    """Law 4: one entry that is not finite, at a rank, micro-step and parameter, skips that step.

    Residuals are those before it, and losses after it those of a run in which its data never came.
    """
    victim, micro_at, parameter = where
    bad_step = 2

    def spoil(engine: Any, step: int, micro: int) -> None:
        if (step, micro, dist.get_rank()) != (bad_step, micro_at, victim):
            return

        def inject(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            spoiled = gradient.clone()
            # the last entry belongs to the last owner, the first to the first
            spoiled.view(-1)[-1 if victim == 0 else 0] = value
            return spoiled

        handle = dict(engine.module.named_parameters())[parameter].register_hook(inject)

    # before 0.19.1 DeepSpeed takes keys out of what it is given
    with running("llama", section, **copy.deepcopy(options)) as engine:
        session = ds_ckpt.session_of(engine)
        models.train(engine, "llama", bad_step)
        before = {n: r.clone() for n, r in session.residuals.items()}
        weights = models.weights_digest(engine)
        models.train(engine, "llama", 1, first=bad_step, spoil=spoil)
        assert models.weights_digest(engine) == weights
        assert session.residuals.keys() == before.keys()
        assert all(torch.equal(before[n], r) for n, r in session.residuals.items())
        assert sum(bool(r.any()) for r in before.values()) > 3
        losses = models.train(engine, "llama", 3, first=bad_step + 1)
        assert engine.skipped_steps == 1
    assert losses == _without_step(section, bad_step, **options)


@once
def _without_step(section: dict[str, Any], left_out: int, **options: Any) -> list[float]:
    """The losses of three steps behind one that never comes."""
    with running("llama", section, **options) as engine:
        models.train(engine, "llama", left_out)
        engine.global_steps += 1
        return models.train(engine, "llama", 3, first=left_out + 1)


def check_no_trace(disturb, steps, section, **options) -> None:
    """Check that an act between two steps changes no loss, weight, residual or skipped step."""
    results = []
    for act in (disturb, lambda engine: None):
        with running("llama", section, **options) as engine:
            models.train(engine, "llama", steps)
            act(engine)
            results.append(outcome(engine, models.train(engine, "llama", 3, first=steps)))
            assert engine.skipped_steps == 0
            assert ds_ckpt.session_of(engine).residuals
    assert results[0] == results[1]


def check_resume(folder: Path, section: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Law 5: a run that resumes after three of six steps is that without a break, to the bit."""
    with running("llama", section, **options) as engine:
        models.train(engine, "llama", 3)
        engine.save_checkpoint(str(folder))
        expected = outcome(engine, models.train(engine, "llama", 3, first=3))
    with running("llama", section, **options) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        assert outcome(engine, models.train(engine, "llama", 3, first=3)) == expected
    return expected
