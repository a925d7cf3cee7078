"""Run in the worker processes: compression and resident weights beside tensor and sequence
parallelism, two by two."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import groups

import ds_ckpt
from ds_ckpt.engine import tuner as tuning
from tests.distributed import models
from tests.distributed.pool import fresh, hosts, once
from tests.distributed.tensor_parallel import (
    MegatronMpu,
    ParallelModel,
    across,
    auto_tp,
    neighbours,
    ulysses_forgotten,
)

SIZE = 2
ULYSSES = ("sp", "mesh")


class _MeanOfTokens(torch.autograd.Function):
    """The mean loss over a sequence's ranks. Each calls backward, and ZeRO-3 takes the mean of all.

    Backward of torch's differentiable all-gather takes ranks of a group for those of the world.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, count: torch.Tensor, group: Any) -> torch.Tensor:
        both = torch.stack([own.detach() * count, count.float()])
        dist.all_reduce(both, group=group)
        ctx.weight = dist.get_world_size(group) * count / both[1]
        return both[0] / both[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.weight, None, None


def _sequence_parallel(model: Any) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", sequence_parallel_size=SIZE, micro_batch_size=2
    )


@contextmanager
def engine_of(kind: str, sections: dict[str, Any], **options: Any) -> Iterator[Any]:
    """An engine of two by two ranks.

    Args:
        kind: "tp" (AutoTP), "init" (of a model made in zero.Init), "megatron" (an mpu), "sp"
            (Ulysses, with the mpu that it returns) or "mesh" (Ulysses, with JSON keys alone, from
            which DeepSpeed makes a device mesh).
    """
    fresh()
    config = models.zero3_config(**{"clip": 1.0, **options}, **sections)
    arguments: dict[str, Any] = {}
    with ulysses_forgotten(), auto_tp(SIZE) if kind in ("tp", "init") else nullcontext():
        if kind in ("tp", "init"):
            config["tensor_parallel"] = {"autotp_size": SIZE}
        if kind in ULYSSES:
            config["sequence_parallel_size"] = SIZE
        if kind == "mesh":
            config["data_parallel_size"] = SIZE
        if kind == "megatron":
            arguments["mpu"] = mpu = MegatronMpu(neighbours(SIZE), across(SIZE))
            model: Any = ParallelModel(mpu.get_model_parallel_group())
        elif kind == "init":
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = models.build("llama")
        else:
            model = models.build("llama")
        if kind == "tp":  # embeddings and head, the largest matrices, are replicated
            for name in ("lm_head", "model.embed_tokens"):
                model._tp_plan.pop(name, None)
        if kind in ULYSSES:
            mpu = _sequence_parallel(model)
            arguments = {"mpu": mpu} if kind == "sp" else {}
        parameters = list(model.parameters())
        engine, *_ = ds_ckpt.initialize(
            model=model, model_parameters=parameters, config=config, **arguments
        )
        engine.train()
        try:
            yield engine
        finally:
            engine.destroy()
            groups.mesh_device = None


def loss_at(engine: Any, kind: str, step: int) -> torch.Tensor:
    replica = dist.get_rank() // SIZE
    if kind == "megatron":
        generator = torch.Generator().manual_seed(1000 * step + replica)
        return engine(torch.randn(2, 5, 7, generator=generator))  # type: ignore[no-any-return]
    data = models.batch("llama", step, replica)
    if kind not in ULYSSES:
        return models.loss_of(engine(**data))
    tokens, labels = data["input_ids"], data["labels"].roll(-1, 1)
    labels[:, -1] = -100
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    own = [x.chunk(SIZE, 1)[dist.get_rank() % SIZE] for x in (tokens, labels, places)]
    logits = engine(input_ids=own[0], position_ids=own[2]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, own[1].flatten())
    group = parallel_state_sp.get_sequence_parallel_group()
    return _MeanOfTokens.apply(loss, (own[1] != -100).sum(), group)  # type: ignore[no-any-return]


def _train(engine: Any, kind: str, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_at(engine, kind, step)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def digests(engine: Any) -> dict[str, str]:
    """By name, of this rank's shard without padding."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        part = parameter.ds_tensor.detach().flatten()
        start = dist.get_rank(parameter.ds_process_group) * part.numel()
        real = part[: max(0, min(part.numel(), parameter.ds_numel - start))].contiguous()
        found[name] = hashlib.sha256(real.view(torch.uint8).numpy()).hexdigest()
    return found


def _owed(engine: Any) -> dict[str, torch.Tensor]:
    """Residuals summed over the ranks that exchange."""
    sums = {}
    for name, residual in sorted(ds_ckpt.session_of(engine).residuals.items()):
        sums[name] = residual.double()
        dist.all_reduce(sums[name], group=engine.optimizer.dp_process_group)
    return sums


@once(when=lambda kind, sections, *_, **__: not sections)
def run(
    kind: str,
    sections: dict[str, Any],
    steps: int,
    *,
    slots: list[int] | None = None,
    skewed: bool = False,
    save: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Train; what the weights were and are, and what is said.

    Args:
        slots: pretended nodes of so many ranks.
        skewed: every other rank's clock finds compressed steps fast, and the others' slow; a
            comparison then has one step of each.
        save: a folder, written two steps before the end.
    """
    before, tuning.COUNTED_STEPS = tuning.COUNTED_STEPS, 1 if skewed else tuning.COUNTED_STEPS
    try:
        with (
            hosts(slots or [dist.get_world_size()]),
            engine_of(kind, sections, **options) as engine,
        ):
            session, start = ds_ckpt.session_of(engine), digests(engine)
            if skewed:
                _skew(session.exchange.step.tuner)
            losses = _train(engine, kind, 0, steps - 2)
            owed = _owed(engine) if session else {}
            if save:
                engine.save_checkpoint(save, tag="good")
            losses += _train(engine, kind, steps - 2, steps)
            tuner = session.exchange.step.tuner if session and session.exchange else None
            return {
                "losses": losses,
                "start": start,
                "end": digests(engine),
                "owed": owed,
                "choice": tuner.choice if tuner else None,
                "summary": session.summary if session else "",
                "moved": session.offload.out.total() if session and session.offload else 0,
                "kept": dict(session.partition.kept_bytes) if session and session.partition else {},
                "skipped": int(engine.skipped_steps),
            }
    finally:
        tuning.COUNTED_STEPS = before


def _skew(tuner: Any) -> None:
    def seconds() -> float:
        is_fast = (tuner.current == "compressed") == (dist.get_rank() % SIZE == 0)
        return 1.0 if is_fast else 4.0 if tuner.current == "compressed" else 2.0

    models.set_clock(tuner, seconds)


def resume(
    kind: str,
    sections: dict[str, Any],
    folder: str,
    bad: list[str],
    first: int,
    last: int,
    *,
    tag: str = "good",
    **options: Any,
) -> dict[str, Any]:
    """Load tags that are refused, then a good one, and train on."""
    with engine_of(kind, sections, **options) as engine:
        _train(engine, kind, 50, 51)
        weights, owed, said = digests(engine), _owed(engine), {}
        for name in bad:
            try:
                engine.load_checkpoint(folder, tag=name)
            except (ds_ckpt.StateError, ZeRORuntimeException) as error:
                said[name] = str(error)
        same = weights == digests(engine) and _equal(owed, _owed(engine))
        engine.load_checkpoint(folder, tag=tag)
        owed = _owed(engine)
        losses = _train(engine, kind, first, last)
        return {
            "said": said,
            "unchanged": same,
            "owed": owed,
            "losses": losses,
            "end": digests(engine),
        }


def _equal(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return some.keys() == other.keys() and all(torch.equal(some[n], other[n]) for n in some)


def conservation(kind: str, sections: dict[str, Any], steps: int) -> float:
    """Law 3 in a step: the largest gap, relative, of what came in against what is left and owed."""
    with engine_of(kind, sections, bucket=10**7) as engine:
        _train(engine, kind, 0, steps)
        group = engine.optimizer.dp_process_group
        session, before, seen = ds_ckpt.session_of(engine), _owed(engine), {}
        exchange = session.exchange.step
        choose = exchange.choose_reduction

        def watched(names: Any, loss_scale: float) -> Any:
            reduction = choose(names, loss_scale)

            def reduce(tensors: Any) -> Any:
                given = [t.double().flatten() for t in tensors]
                result = reduction(tensors)
                seen.update(zip(names, zip(given, result, strict=True), strict=True))
                return result

            return reduction and reduce

        exchange.choose_reduction = watched
        _train(engine, kind, steps, steps + 1)
        after, worst = _owed(engine), 0.0
        world, me = dist.get_world_size(group), dist.get_rank(group)
        for name, left in after.items():
            given, delivered = seen[name]
            dist.all_reduce(given, group=group)
            put_in = before[name] + given / world
            whole = torch.zeros(-(-len(given) // world) * world, dtype=torch.float64)
            start = me * (len(whole) // world)
            whole[start : start + len(delivered)] = delivered.double()
            dist.all_reduce(whole, group=group)
            gap = (put_in - whole[: len(given)] - left).abs().max() / put_in.abs().max()
            worst = max(worst, float(gap))
        assert after
        return worst


def poisoned(kind: str, sections: dict[str, Any], name: str, ranks: list[int]) -> dict[str, Any]:
    """A gradient is NaN in one step on some ranks: what that leaves."""
    with engine_of(kind, sections) as engine:
        _train(engine, kind, 0, 3)
        weights, owed = digests(engine), _owed(engine)
        if dist.get_rank() in ranks:
            parameter = dict(engine.module.named_parameters())[name]
            handle = parameter.register_hook(lambda g: torch.full_like(g, torch.nan))
        _train(engine, kind, 3, 4)
        if dist.get_rank() in ranks:
            handle.remove()
        same = weights == digests(engine) and _equal(owed, _owed(engine))
        _train(engine, kind, 4, 5)
        return {"same": same, "skipped": int(engine.skipped_steps)}


def refused(kind: str, sections: dict[str, Any], slots: list[int]) -> str:
    """The words of the error at the start, if there is one."""
    try:
        with hosts(slots), engine_of(kind, sections) as engine:
            _train(engine, kind, 0, 1)
            return ""
    except ds_ckpt.UnsupportedError as error:
        return str(error)
