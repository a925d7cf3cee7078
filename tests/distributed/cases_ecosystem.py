"""Run in the worker processes: what people train with, under ZeRO-3, with and without ds_ckpt."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ckpt
from tests import architectures
from tests.distributed import ecosystem_models, models
from tests.distributed.log_capture import captured_log
from tests.distributed.pool import fresh, once

OFFLOAD = {"offload": True, "offload_min_bytes": 0}
PLANS: dict[str, dict[str, Any]] = {
    "stock": {},
    "block": {"policy": "block"},
    "segments": {"policy": "segments", "segment_size": 2},
    "selective": {"policy": "selective"},
    "block, offload": {"policy": "block", **OFFLOAD},
    "selective, offload": {"policy": "selective", **OFFLOAD},
    "block, lead": {"policy": "block"},
    "block, dense": {"policy": "block"},
}
BESIDE = {
    "block, offload": {"weights": {"resident": "auto"}},
    "block, lead": models.topk_section(topk={"density": 0.05}, error_feedback={"momentum": 0.3}),
    "block, dense": {"compression": {"method": "dense"}},
}
"""Sections beside `activation`."""


def _sections(plan: str, modules: tuple[str, ...] = ()) -> dict[str, Any]:
    if plan == "stock":
        return {}
    named = {"modules": list(modules)} if modules else {}
    return {"ds_ckpt": {"activation": {**PLANS[plan], **named}, **BESIDE.get(plan, {})}}


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _done(engine: Any) -> dict[str, Any]:
    """Return this rank's results of training, and the counters of ds_ckpt."""
    session = ds_ckpt.session_of(engine)
    buffers = [b.reshape(-1) for b in engine.module.buffers() if b.numel()]
    offload = session.offload if session is not None else None
    return {
        "weights": models.weights_digest(engine),
        "buffers": _digest(buffers),
        "summary": session.summary if session is not None else "",
        "blocks": len(session._blocks.blocks) if session is not None else 0,
        "moved": offload.out.total() if offload is not None else 0,
        "back": offload.back.total() if offload is not None else 0,
    }


def _start(name: str, plan: str) -> Any:
    fresh()
    model = ecosystem_models.build(name)
    sections = _sections(plan, ecosystem_models.KINDS[name].modules)
    engine, *_ = ds_ckpt.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=models.zero3_config(reuse=0, **sections),
    )
    engine.train()
    return engine


def train(names: list[str], plans: list[str], steps: int = 3) -> dict[str, dict[str, Any]]:
    """By model and plan: losses, gradients and weights of a few steps; data differ by process."""
    results = {}
    for name in names:
        for plan in plans:
            engine = _start(name, plan)
            losses, gradients = [], []
            for step in range(steps):
                torch.manual_seed(step + 10 * dist.get_rank())
                data = ecosystem_models.KINDS[name].batch(2 * step + dist.get_rank())
                loss = models.loss_of(engine(**data))
                engine.backward(loss)
                gradients.append([_digest([g]) for g in models.gradients(engine)])
                engine.step()
                losses.append(float(loss.detach()))
            results[f"{name}: {plan}"] = {"losses": losses, "gradients": gradients, **_done(engine)}
            engine.destroy()
    return results


def generate_between_steps(plan: str) -> dict[str, Any]:
    """Steps, generation with a cache (prompts of other lengths by process), evaluation, steps."""
    fresh()
    model = architectures.build("llama", 3)
    engine, *_ = ds_ckpt.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=models.zero3_config(**_sections(plan)),
    )
    losses, written, evaluated, lengths = [], [], [], []
    for step in range(3):
        engine.train()
        torch.manual_seed(step)
        data = architectures.batch("llama", 2 * step + dist.get_rank())
        loss = engine(**data, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        engine.eval()
        with torch.no_grad():
            prompt = data["input_ids"][:1, : 3 + dist.get_rank()]
            more = {"max_new_tokens": 4 + 2 * dist.get_rank(), "do_sample": step == 1}
            written.append(engine.module.generate(prompt, synced_gpus=True, **more).tolist())
            out = engine(**data, use_cache=True)
            evaluated.append(float(out.loss))
            lengths.append(out.past_key_values.get_seq_length())
    result = {"losses": losses, "written": written, "evaluated": evaluated, "lengths": lengths}
    result.update(_done(engine))
    engine.destroy()
    return result


def generate_in_training_mode(plan: str) -> dict[str, Any]:
    """As trl does: reentrant checkpointing, off for a generation between steps and on again."""
    from deepspeed.runtime.zero import unwrap_model_for_generation

    fresh()
    model: Any = architectures.build("llama", 3, use_cache=True)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    engine, *_ = ds_ckpt.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=models.zero3_config(**_sections(plan)),
    )
    engine.train()
    losses, written = [], []
    for step in range(3):
        data = architectures.batch("llama", 2 * step + dist.get_rank())
        prompt = data["input_ids"][:1, : 3 + dist.get_rank()]
        model.gradient_checkpointing_disable()
        with unwrap_model_for_generation(engine), torch.no_grad():
            text = model.generate(prompt, max_new_tokens=4, do_sample=step == 1)
        written.append(text.tolist())
        model.gradient_checkpointing_enable({"use_reentrant": True})
        loss = engine(**data).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    result = {"losses": losses, "written": written, **_done(engine)}
    engine.destroy()
    return result


@once(when=lambda plans, way: plans[0] == "stock")
def second_engine(plans: tuple[str, str], way: str) -> dict[str, Any]:
    """Two trainings of one model, each in an engine of its own.

    Args:
        way: whether somebody keeps the first engine, and uses it again, drops or destroys it.
    """
    fresh()
    model: Any = architectures.build("llama", 3)
    engines, losses = [], []
    with captured_log() as lines:
        for number, plan in enumerate(plans):
            engine, *_ = ds_ckpt.initialize(
                model=model,
                model_parameters=list(model.parameters()),
                config=models.zero3_config(reuse=0, **_sections(plan)),
            )
            engines.append(engine)
            engine.train()
            for step in range(3):
                data = architectures.batch("llama", 2 * step + dist.get_rank())
                loss = engine(**data).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            if number == 0 and way != "keep":
                engine.destroy() if way == "destroy" else engines.clear()
                del engine
                gc.collect()
    refused = ""
    try:
        if way == "keep":
            engines[0].backward(engines[0](**data).loss)
    except ds_ckpt.UnsupportedError as error:
        refused = str(error)
    with torch.no_grad():
        evaluated = float(engines[0](**data).loss)
    forwards = [0]
    gate = model.model.layers[0].mlp.gate_proj
    gate.register_forward_pre_hook(lambda *_: forwards.append(1))
    engine.backward(engine(**data).loss)
    result = {"losses": losses, "evaluated": evaluated, "refused": refused, **_done(engine)}
    result["forwards"] = sum(forwards)
    result["ended"] = sum("earlier engine" in line for line in lines)
    for engine in engines:
        engine.destroy()
    result["patched"] = sum("forward" in vars(m) for m in model.modules())
    return result


# the HF Trainer and accelerate, which call `deepspeed.initialize` themselves


class _Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, rows: int, first: int = 0) -> None:
        self._rows, self._first = rows, first

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._first + index)
        tokens = torch.randint(3, architectures.VOCAB, (12,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def _tell_accelerate() -> None:
    """Set accelerate's world size: with DeepSpeed and no GPU it assumes one rank."""
    from accelerate.state import PartialState

    state = PartialState()
    state.backend, state.num_processes = "gloo", dist.get_world_size()
    state.process_index = state.local_process_index = dist.get_rank()


@contextlib.contextmanager
def _installed() -> Any:
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def reset() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()

    reset()
    _tell_accelerate()
    ds_ckpt.install()
    try:
        yield
    finally:
        ds_ckpt.uninstall()
        unset_hf_deepspeed_config()
        reset()


def _model() -> nn.Module:
    return architectures.build("llama", 3, attention_dropout=0.1)


def _hf_config(plan: str) -> dict[str, Any]:
    config = copy.deepcopy(models.zero3_config(**_sections(plan)))
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[key] = "auto"
    config["bf16"] = {"enabled": "auto"}
    config["gradient_clipping"] = "auto"
    return config


def _trainer(folder: str, plan: str, model: nn.Module, **flags: Any) -> Any:
    """Four steps of two micro batches, an evaluation after each, a checkpoint after two."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        deepspeed=_hf_config(plan),
        **flags,
    )
    assert arguments.device.type == "cpu"  # asked for, since that makes the state anew
    _tell_accelerate()
    data = {"train_dataset": _Rows(32), "eval_dataset": _Rows(8, 99)}
    return Trainer(model=model, args=arguments, **data)


def _trained(running: Any) -> dict[str, Any]:
    assert running.accelerator.num_processes == dist.get_world_size()
    history = running.state.log_history
    return {
        "losses": [h["loss"] for h in history if "loss" in h],
        "evaluated": [h["eval_loss"] for h in history if "eval_loss" in h],
        **_done(running.model_wrapped),
    }


def trainer(folder: str, plan: str, resume: bool, **flags: Any) -> dict[str, Any]:
    """One training.

    Args:
        resume: begin with the checkpoint that an earlier run has left after two steps.
    """
    fresh()
    with _installed():
        running = _trainer(folder, plan, _model(), **flags)
        start = Path(folder) / "checkpoint-2"
        running.train(resume_from_checkpoint=str(start) if resume else None)
        return _trained(running)


def two_trainers(folder: str, plan: str, **flags: Any) -> list[dict[str, Any]]:
    """Two trainings of one model in one script; nobody destroys the first engine.

    Alone, DeepSpeed needs it: the first engine's gradient hooks fill a small bucket, and fail.
    """
    fresh()
    with _installed():
        model, results, trainers = _model(), [], []
        for number in range(2):
            trainers.append(_trainer(f"{folder}/{number}", plan, model, **flags))
            trainers[-1].train()
            results.append(_trained(trainers[-1]))
            if plan == "stock":
                trainers[-1].model_wrapped.destroy()
        return results


def accelerate(folder: str, plan: str) -> dict[str, Any]:
    """`prepare`, `accumulate`, clipping, evaluation, `save_state` and `load_state`."""
    fresh()
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    with _installed():
        config = models.zero3_config(accumulation=2, clip=1.0, **_sections(plan))
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = _model()
        loader = torch.utils.data.DataLoader(_Rows(16), batch_size=2, shuffle=False)
        engine, optimizer, loader = accelerator.prepare(
            model, DummyOptim(model.parameters()), loader
        )
        assert accelerator.num_processes == dist.get_world_size()
        losses: list[float] = []
        evaluated: list[float] = []

        def epoch(seed: int) -> None:
            engine.train()
            for number, rows in enumerate(loader):
                torch.manual_seed(100 * seed + number)
                with accelerator.accumulate(engine):
                    loss = engine(**rows).loss
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(engine.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(float(loss.detach()))
            engine.eval()
            with torch.no_grad():
                mine = engine(**{k: v[None] for k, v in _Rows(1, 99)[0].items()}).loss
                evaluated.append(float(accelerator.gather(mine.reshape(1)).mean()))

        epoch(0)
        accelerator.save_state(folder)
        epoch(1)
        accelerator.load_state(folder)
        epoch(1)
        return {"losses": losses, "evaluated": evaluated, **_done(engine)}
