"""Common training libraries, compared bit by bit with the same run without ds_ckpt."""

import contextlib
import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ckpt
from tests import architectures
from tests.distributed import ecosystem_models, models
from tests.distributed.pool import fresh, once, ranks
from tests.distributed.training import captured_log, largest_gap, of_all_ranks, running

SLOW = pytest.mark.slow
LORA = ["lora", "lora-ready"]
OFFLOAD = {"offload": True, "offload_min_bytes": 0}
REENTRANT = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
BESIDE = {
    "block, offload": {"weights": {"resident": "auto"}},
    "block, lead": models.topk_section(topk={"density": 0.05}, error_feedback={"momentum": 0.3}),
    "block, dense": {"compression": {"method": "dense"}},
}
"""Sections beside `activation`, by plan: a policy, and more."""

_SAME = ("losses", "gradients", "evaluated", "written", "lengths", "weights", "buffers")


def _compare(plain: dict[str, Any], ours: dict[str, Any], plan: str) -> None:
    for key in _SAME:
        assert plain.get(key) == ours.get(key), key
    assert len(set(plain["losses"])) == len(plain["losses"]), "the weights have not moved"
    assert plain["blocks"] == plain["moved"] == 0
    assert ours["blocks"] >= 3
    assert (ours["moved"] > 0) == ("offload" in plan)
    # LLaVA leaves the last layers of its eyes out of the loss: nothing of them comes back
    assert ours["moved"] // 2 <= ours["back"] <= ours["moved"]


def _sections(plan: str, modules: tuple[str, ...] = ()) -> dict[str, Any]:
    if plan == "stock":
        return {}
    policy, _, more = plan.partition(", ")
    activation = {"policy": policy, **(OFFLOAD if more == "offload" else {})}
    activation |= {"modules": list(modules)} if modules else {}
    return {"ds_ckpt": {"activation": activation, **BESIDE.get(plan, {})}}


def _done(engine: Any) -> dict[str, Any]:
    """Return this rank's results of training, and the counters of ds_ckpt."""
    session = ds_ckpt.session_of(engine)
    offload = session.offload if session is not None else None
    return {
        "weights": models.weights_digest(engine),
        "buffers": models.digest(b for b in engine.module.buffers() if b.numel()),
        "summary": session.summary if session is not None else "",
        "blocks": len(session._blocks.blocks) if session is not None else 0,
        "moved": offload.out.total() if offload is not None else 0,
        "back": offload.back.total() if offload is not None else 0,
    }


def _step(engine: Any, data: dict[str, Any]) -> float:
    loss = models.loss_of(engine(**data))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _llama(step: int) -> dict[str, Any]:
    return architectures.batch("llama", 2 * step + dist.get_rank())


def _trained(name: str, plan: str) -> dict[str, Any]:
    """Losses, gradients and weights of three steps; data differ by process."""
    fresh()
    kind, losses, gradients = ecosystem_models.KINDS[name], [], []
    sections = _sections(plan, kind.modules)
    with running(ecosystem_models.build(name), reuse=0, **sections) as engine:
        for step in range(3):
            torch.manual_seed(step + 10 * dist.get_rank())
            loss = models.loss_of(engine(**kind.batch(2 * step + dist.get_rank())))
            engine.backward(loss)
            gradients.append([models.digest([g]) for g in models.gradients(engine)])
            engine.step()
            losses.append(float(loss.detach()))
        return {"losses": losses, "gradients": gradients, **_done(engine)}


@pytest.mark.parametrize(
    ("names", "plan"),
    [
        (["experts", "lora"], "selective, offload"),
        *(
            pytest.param(names, plan, marks=SLOW)
            for names in (["resnet", "llava", "nn.Transformer"], ["bart", "experts"], LORA)
            for plan in ("selective, offload", "block")
        ),
    ],
    ids=str,
)
@ranks(2, timeout=280)
def test_training_is_what_it_is_without(names: list[str], plan: str) -> None:
    """Losses, gradients, weights and buffers of three steps, for policies with and without offload.

    BatchNorm's statistics are buffers; with experts, the two processes run other ones.
    """
    for name in names:
        _compare(_trained(name, "stock"), _trained(name, plan), plan)


@ranks(2)
def test_generation_and_evaluation_between_steps() -> None:
    """Generation has a cache, and prompts of other lengths by process."""
    plan, results, me = "selective, offload", [], dist.get_rank()
    for one in ("stock", plan):
        fresh()
        found: dict[str, Any] = {key: [] for key in ("losses", "written", "evaluated", "lengths")}
        with running(architectures.build("llama", 3), **_sections(one)) as engine:
            for step in range(3):
                engine.train()
                torch.manual_seed(step)
                data = _llama(step)
                found["losses"].append(_step(engine, {**data, "use_cache": False}))
                engine.eval()
                with torch.no_grad():
                    more = {"max_new_tokens": 4 + 2 * me, "do_sample": step == 1}
                    prompt = data["input_ids"][:1, : 3 + me]
                    text = engine.module.generate(prompt, synced_gpus=True, **more)
                    found["written"].append(text.tolist())
                    out = engine(**data, use_cache=True)
                    found["evaluated"].append(float(out.loss))
                    found["lengths"].append(out.past_key_values.get_seq_length())
            results.append({**found, **_done(engine)})
    _compare(*results, plan)
    assert results[1]["lengths"] == [11] * 3  # the evaluation has filled its cache
    shorter, longer = of_all_ranks(len(results[1]["written"][0][0]))
    assert shorter < longer


@ranks(2)
def test_checkpointing_that_is_switched_off_around_generation() -> None:
    """The model is in training mode, and the arguments are not the policy's.

    As trl does: reentrant checkpointing, off for a generation between steps and on again.
    """
    from deepspeed.runtime.zero import unwrap_model_for_generation

    results = []
    for plan in ("stock", "block"):
        fresh()
        model: Any = architectures.build("llama", 3, use_cache=True)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        losses, written = [], []
        with running(model, **_sections(plan)) as engine:
            for step in range(3):
                data = _llama(step)
                prompt = data["input_ids"][:1, : 3 + dist.get_rank()]
                model.gradient_checkpointing_disable()
                with unwrap_model_for_generation(engine), torch.no_grad():
                    text = model.generate(prompt, max_new_tokens=4, do_sample=step == 1)
                written.append(text.tolist())
                model.gradient_checkpointing_enable({"use_reentrant": True})
                losses.append(_step(engine, data))
            results.append({"losses": losses, "written": written, **_done(engine)})
    _compare(*results, "block")


@once(when=lambda plans, way: plans[0] == "stock")
def _second_engine(plans: tuple[str, str], way: str) -> dict[str, Any]:
    """Two trainings of one model, each in an engine of its own.

    Args:
        way: whether somebody keeps the first engine, and uses it again, drops or destroys it.
    """
    fresh()
    model: Any = architectures.build("llama", 3)
    engines, losses = [], []
    with captured_log() as lines:
        for number, plan in enumerate(plans):
            engine = models.start(model, models.zero3_config(reuse=0, **_sections(plan)))
            engines.append(engine)
            for step in range(3):
                data = _llama(step)
                losses.append(_step(engine, data))
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


@pytest.mark.parametrize(
    ("plans", "way"),
    [
        (("block", "stock"), "keep"),
        pytest.param(("block, dense", "block, offload"), "keep", marks=SLOW),
        pytest.param(("block, dense", "block, dense"), "drop", marks=SLOW),
    ],
)
@ranks(2)
def test_a_second_engine_takes_the_model_over(plans: tuple[str, str], way: str) -> None:
    without = _second_engine(("stock", "stock"), "destroy")
    with_us = _second_engine(plans, way)
    for key in ("losses", "evaluated", "weights"):
        assert with_us[key] == without[key], key
    assert with_us["forwards"] == without["forwards"] + (plans[1] != "stock")
    assert with_us["patched"] == without["patched"] == 0
    assert ("a later engine trains" in with_us["refused"]) == (way == "keep")
    # something refers to a dropped engine, too
    assert with_us["ended"] == (dist.get_rank() == 0)


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
def installed() -> Any:
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

    twos = ("per_device_train_batch_size", "per_device_eval_batch_size", "save_steps")
    flags |= dict.fromkeys((*twos, "gradient_accumulation_steps"), 2)
    flags |= {"max_steps": 4, "logging_steps": 1, "eval_steps": 1, "learning_rate": 1e-2, "seed": 0}
    flags |= {"eval_strategy": "steps", "save_strategy": "steps", "deepspeed": _hf_config(plan)}
    arguments = TrainingArguments(output_dir=folder, report_to=[], disable_tqdm=True, **flags)
    assert arguments.device.type == "cpu"  # asked for, since that makes the state anew
    _tell_accelerate()
    data = {"train_dataset": _Rows(32), "eval_dataset": _Rows(8, 99)}
    return Trainer(model=model, args=arguments, **data)


def _results(running: Any) -> dict[str, Any]:
    assert running.accelerator.num_processes == dist.get_world_size()
    history = running.state.log_history
    return {
        "losses": [h["loss"] for h in history if "loss" in h],
        "evaluated": [h["eval_loss"] for h in history if "eval_loss" in h],
        **_done(running.model_wrapped),
    }


def _train_once(folder: Path, plan: str, resume: bool, **flags: Any) -> dict[str, Any]:
    """One training.

    Args:
        resume: begin with the checkpoint that an earlier run has left after two steps.
    """
    fresh()
    with installed():
        running = _trainer(str(folder), plan, _model(), **flags)
        start = folder / "checkpoint-2"
        running.train(resume_from_checkpoint=str(start) if resume else None)
        return _results(running)


def _accelerated(folder: str, plan: str) -> dict[str, Any]:
    """`prepare`, `accumulate`, clipping, evaluation, `save_state` and `load_state`."""
    fresh()
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    with installed():
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


@pytest.mark.parametrize(
    ("plan", "flags"),
    [
        pytest.param("block", {**REENTRANT, "activation_checkpointing": True}, marks=SLOW),
        ("block, offload", {"gradient_checkpointing": True}),
    ],
    ids=str,
)
@ranks(2)
def test_trainer_with_evaluation_accumulation_and_resume(tmp_path, plan, flags) -> None:
    plain = _train_once(tmp_path / "plain", "stock", False)
    ours = _train_once(tmp_path / "ours", plan, False, **flags)
    assert len(ours["losses"]) == len(ours["evaluated"]) == 4
    _compare(plain, ours, plan)
    _compare(plain, _train_once(tmp_path / "ours", plan, True, **flags), plan)


@ranks(2)
def test_trainer_with_compression_and_resume(tmp_path: Path) -> None:
    plain = _train_once(tmp_path / "plain", "stock", False)
    ours = _train_once(tmp_path / "ours", "block, lead", False)
    resumed = _train_once(tmp_path / "ours", "block, lead", True)
    assert "Top-K" in ours["summary"]
    assert "momentum correction" in ours["summary"]
    assert "one exchange per accumulated step" in ours["summary"]
    assert ours["losses"][0] == plain["losses"][0]
    assert 0 < largest_gap(ours["losses"], plain["losses"]) < 0.1
    assert resumed["losses"] == ours["losses"]
    assert resumed["weights"] == ours["weights"]


@ranks(2)
def test_accelerate_with_accumulation_and_resume(tmp_path: Path) -> None:
    plain, ours = (_accelerated(str(tmp_path / plan), plan) for plan in ("stock", "block, offload"))
    for key in ("losses", "evaluated", "weights"):
        assert plain[key] == ours[key], key
    assert ours["losses"][4:8] == ours["losses"][8:]
    assert ours["losses"][:4] != ours["losses"][4:8]
    assert ours["blocks"] == 3
    assert ours["moved"] > 0
