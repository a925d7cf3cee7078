"""Checks that need a GPU, in eight minutes: equal results to the CPU, and speed.

    ./scripts/gpu_check.sh [--json gpu_check.json] [--only codecs law3 ...]
    python -m benchmarks.gpu_check --device cpu      # a rehearsal: what needs a GPU is left out

Each check is a process of its own with a time limit, so that one that fails, hangs or ends the
driver does not stop the others. What they found goes into one JSON file, with the machine's
hardware and versions and the date; a short table is printed; the exit status is not 0 if a check
failed or a target of speed is missed. On one GPU processes share it and talk over gloo.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ckpt.compression import (
    Codec,
    Compressor,
    EntropyCoded,
    Feedback,
    LowRank,
    Quantize,
    TopK,
    fused,
)
from ds_ckpt.compression.powersgd import Factors, orthogonalize, orthogonalize_all
from ds_ckpt.compression.storage import ResidualDtype
from ds_ckpt.exchange.exchange import AllToAllExchange
from ds_ckpt.exchange.transport import TorchTransport
from ds_ckpt.lab.validate.virtual import VirtualWorld

Found = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
WORLD = 4
INSTRUCTIONS = {8: (472, 151), 4: (440, 157), 3: (502, 251), 2: (635, 188)}
"""Of each of 4 warps for 1,024 entries, pack and unpack (docs/gpu.md), by bits."""
REACHED = 0.6
"""Least share of a kernel's bound by memory, or by instructions of this card."""
LINK_BYTES_PER_S = 400e9 / 8
"""At which 3 bits are to take less time than the bytes that they save."""
METHODS: dict[str, Compressor | None] = {
    "uncompressed": None,
    "8 bits": Quantize(bits=8),
    "4 bits": Quantize(bits=4),
    "3 bits": Quantize(bits=3),
    "2 bits": Quantize(bits=2),
    "1 bit": EntropyCoded(bits=1.0),
    "Top-K blocks 1%": TopK(density=0.01),
    "PowerSGD rank 4": LowRank(4),
}
SHAPES = ((96, 192), (192,), (64, 130), (33, 20))
RESIDUALS: tuple[tuple[ResidualDtype, Any], ...] = (
    ("fp32", "accelerator"),
    ("bf16", "accelerator"),
    ("int8", "accelerator"),
    ("int8", "cpu"),
)


def gradients(process: int, shapes: Sequence[tuple[int, ...]] = SHAPES, step: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(100 * step + process)
    return [torch.randn(s, generator=generator, dtype=torch.float32).bfloat16() for s in shapes]


def one_process(transport: Any, method: Compressor | None, **feedback: Any) -> AllToAllExchange:
    def choose(name: str, shape: torch.Size) -> Compressor | None:
        return method if len(shape) > 1 else None

    seed = transport.dp_rank
    return AllToAllExchange(transport, choose, Feedback(seed=seed, **feedback), Factors())


def commit(exchange: AllToAllExchange) -> int:
    """The step is taken; how many of its buckets were not finite."""
    bad = exchange.nonfinite_buckets
    exchange.feedback.commit()
    exchange.factors.commit()
    exchange.reset_step()
    return bad


def operators() -> contextlib.AbstractContextManager[Any]:
    """Without the fused kernels."""
    return mock.patch.object(fused, "is_supported", return_value=False)


# ---- the checks


def versions(device: torch.device) -> Found:
    """Hardware and versions."""
    import deepspeed

    found: Found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    with contextlib.suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            asked = subprocess.run(query, capture_output=True, text=True, check=False)
            found["driver"] = asked.stdout.strip()
        assert fused.is_supported(device), "no triton: the fused kernels are not used"
    return found


def alone(device: torch.device) -> Found:
    """Collectives of a world of one, with an empty split."""
    with _group(device, 0, 1, nccl=device.type == "cuda"):
        sent = torch.arange(8, dtype=torch.uint8, device=device)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, [8], [8])
        assert torch.equal(arrived, sent)
        nothing = sent.new_empty(0)
        dist.all_to_all_single(nothing, nothing, [0], [0])
        backend = dist.get_backend()
    return {"backend": backend}


def codecs(device: torch.device) -> Found:
    """Payloads, residuals and sums on the device against the CPU, whatever is set around them."""
    compared = 0
    for around in (_as_is, _tf32, _autocast, _bf16_default, _deterministic):
        with around(device):
            for method in METHODS.values():
                codec = method.codec if method is not None else None
                for numel in (1, 63, 2049, 70_000):
                    if codec is not None:
                        _compare_codec(codec, numel, device)
                        compared += 1
            for dtype, place in RESIDUALS:
                _compare_feedback(dtype, place, device)
                compared += 1
            factors = [torch.randn(300, 4, dtype=torch.float32) for _ in range(3)]
            ours = orthogonalize_all([factor.to(device) for factor in factors])
            for factor, unit in zip(factors, ours, strict=True):
                assert (unit.cpu() - orthogonalize(factor)).abs().max() < 1e-6
    return {"compared": compared}


def _compare_codec(codec: Codec, numel: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(2, numel, generator=generator, dtype=torch.float32, device="cpu")
    here, there = values.clone(), values.to(device, copy=True)
    size = codec.packed_bytes(numel)
    payloads = [torch.empty(2, size, dtype=torch.uint8, device=d) for d in ("cpu", device)]
    with operators():
        codec.pack_rows(here, payloads[0])
    codec.pack_rows(there, payloads[1])
    sums = [torch.zeros(numel, dtype=torch.float32, device=d) for d in ("cpu", device)]
    with operators():
        codec.unpack_add_rows(payloads[1].cpu(), sums[0])
    codec.unpack_add_rows(payloads[1], sums[1])
    assert (sums[0] - sums[1].cpu()).abs().max() <= 1e-6, (codec, numel, "decoded")
    left = there.cpu().sum(0) + sums[1].cpu() - values.sum(0)
    assert left.abs().max() <= 1e-5, (codec, numel, "something is lost")
    if isinstance(codec, Quantize) and codec.bits == 2:
        return  # a scale may be one rounding off
    assert torch.equal(payloads[0], payloads[1].cpu()), (codec, numel, "payloads differ")
    assert torch.equal(here, there.cpu()), (codec, numel, "what is left differs")


def _compare_feedback(dtype: ResidualDtype, place: Any, device: torch.device) -> None:
    left = []
    for where in (torch.device("cpu"), device):
        feedback = Feedback(dtype=dtype, device=place if where == device else "accelerator")
        for step in range(2):
            grad = gradients(0, ((3000,),), step)[0].to(where)
            working = feedback.accumulate("w", grad, 4, 1024.0)
            working[::3] = 0.0
            feedback.store("w", working)
            feedback.commit()
        left.append(feedback.state_dict()["w"].cpu())
    assert torch.equal(*left), (dtype, place, "residuals differ")


def law3(device: torch.device) -> Found:
    """Nothing is lost: gradients are what was delivered and what is left, in a world of four."""
    worst = {}
    for name, method in METHODS.items():
        for dtype, place in RESIDUALS:
            worst[f"{name}, {dtype} on {place}"] = _lost(method, dtype, place, device)
    limits = {"fp32": 1e-5, "bf16": 2e-2, "int8": 5e-2}
    for name, lost in worst.items():
        assert lost <= limits[name.split(", ")[-1].split(" ")[0]], (name, lost)
    return {"worst": worst}


def _lost(
    method: Compressor | None, dtype: ResidualDtype, place: Any, device: torch.device
) -> float:
    """The largest entry that is neither delivered nor left, of unit gradients, over two steps."""
    from ds_ckpt.exchange.layout import ShardLayout

    world = VirtualWorld(WORLD)
    exchanges = [one_process(t, method, dtype=dtype, device=place) for t in world.transports]
    names = [f"p{i}" for i in range(len(SHAPES))]
    given = [torch.zeros(torch.Size(s).numel(), dtype=torch.float64) for s in SHAPES]
    delivered = [torch.zeros_like(t) for t in given]
    for step in range(2):
        every = [[g.float() for g in gradients(p, step=step)] for p in range(WORLD)]

        def work(p: int, every: list[list[Tensor]] = every) -> list[Tensor]:
            sent = [g.to(device) for g in every[p]]
            return [t.cpu() for t in exchanges[p].average(names, sent, 8.0)]

        shards = world.run(work)
        assert not sum(commit(exchange) for exchange in exchanges)
        for i, total in enumerate(given):
            total += sum(e[i].flatten().double() for e in every) / WORLD / 8.0
            delivered[i] += torch.cat([shards[p][i] for p in range(WORLD)]).double() / 8.0
    worst = 0.0
    for i, name in enumerate(names):
        layout = ShardLayout(len(given[i]), WORLD)
        left = sum(
            e.feedback.state_dict().get(name, torch.zeros(1)).cpu().double() for e in exchanges
        )
        assert layout.world == WORLD
        worst = max(worst, float((given[i] - delivered[i] - left).abs().max()))
    return worst * 8.0


class _Loopback:
    """A process of a world of equals, whose packets come back to it: no network is involved."""

    def __init__(self, world: int) -> None:
        self.world, self.dp_rank = world, 0

    def all_to_all(self, output: Tensor, input: Tensor, *_: Sequence[int]) -> None:
        output.copy_(input)

    def all_reduce(self, tensor: Tensor) -> None:
        """It is the sum already."""


def _bucket(device: torch.device, tensors: int, side: int) -> list[Tensor]:
    made = torch.randn(tensors, side, side, device=device, dtype=torch.float32).bfloat16()
    return list(made.unbind())


def waits(device: torch.device) -> Found:
    """A bucket makes the host wait for nothing, and how many kernels it launches."""
    launches: dict[str, dict[str, int]] = {}
    names = [f"p{i}" for i in range(16)]
    for name, method in METHODS.items():
        launches[name] = {}
        # entropy-coded values by operators read counts back
        for way in ("kernels", "operators")[: 2 - isinstance(method, EntropyCoded)]:
            with operators() if way == "operators" else contextlib.nullcontext():
                exchange = one_process(_Loopback(8), method)
                for step in range(2):
                    tensors = _bucket(device, 16, 192)
                    if step:
                        with _no_waits(device), _profiled(device) as profiled:
                            exchange.average(names, tensors, 8.0)
                        launches[name][way] = profiled()
                    else:
                        exchange.average(names, tensors, 8.0)
                    commit(exchange)
    return {"launches": launches}


def times(device: torch.device) -> Found:
    """Milliseconds of a bucket by method, fused and operator by operator, beside the memory's
    bandwidth; no network. A world of eight; bf16 gradients, fp32 residuals."""
    tensors, side = (16, 4096) if device.type == "cuda" else (4, 64)
    entries = tensors * side * side
    source = torch.empty(entries, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_ms = _median_ms(device, lambda a=source, b=target: b.copy_(a))
    bandwidth = 8 * entries / copy_ms * 1e3
    del source, target
    found: Found = {"entries": entries, "copy_bytes_per_s": bandwidth, "methods": {}}
    names = [f"p{i}" for i in range(tensors)]
    for name, method in METHODS.items():
        row: Found = {}
        for way in ("kernels", "operators"):
            with operators() if way == "operators" else contextlib.nullcontext():
                exchange = one_process(_Loopback(8), method)
                bucket = _bucket(device, tensors, side)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()

                def step(exchange: AllToAllExchange = exchange, bucket: Any = bucket) -> None:
                    exchange.average(names, [t.clone() for t in bucket], 8.0)
                    exchange.feedback.commit()
                    exchange.factors.commit()
                    exchange._finite.clear()

                row[f"{way}_ms"] = _median_ms(device, step)
                if device.type == "cuda":
                    row[f"{way}_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["methods"][name] = row
    found["pack"] = _pack_times(device, tensors, side, bandwidth)
    if device.type == "cuda":
        found["missed"] = missed_targets(found)
    return found


def missed_targets(found: Found) -> list[str]:
    """Return each target that `times` missed, with its figures.

    3 bits are compared with the link's time for the bytes that they save: seven shards of eight.
    """
    if "left out" in found["pack"]:
        return [f"kernels are not fused: {found['pack']['left out']}"]
    missed = [
        f"{bits}, {kernel}: {row[f'{kernel}_ms']:.2f} ms, at most {row[f'{kernel}_target_ms']:.2f}"
        for bits, row in found["pack"].items()
        for kernel in ("pack", "unpack_add")
        if row[f"{kernel}_ms"] > row[f"{kernel}_target_ms"]
    ]
    numel = found["entries"] * 7 // 8
    saved_bytes = 2 * numel - Quantize(bits=3).packed_bytes(numel)
    saved_ms = 1e3 * saved_bytes / LINK_BYTES_PER_S
    takes_ms = found["methods"]["3 bits"]["kernels_ms"]
    if takes_ms >= saved_ms:
        missed.append(
            f"3 bits take {takes_ms:.2f} ms of a bucket of {found['entries']} entries and save "
            f"{saved_ms:.2f} ms at 400 Gbit/s"
        )
    return missed


def _pack_times(device: torch.device, tensors: int, side: int, bandwidth: float) -> Found:
    """The two kernels alone, and the most that each may take on this card."""
    found: Found = {}
    if not fused.is_supported(device):
        return {"left out": "no Triton for this device"}
    for bits, instructions in INSTRUCTIONS.items():
        codec = Quantize.model_validate({"bits": bits})
        entries, numel = tensors * side * side, side * side // 8
        residuals = [t.view(8, -1).float() for t in _bucket(device, tensors, side)]
        size = codec.packed_bytes(numel)
        packets = torch.empty(tensors, 8, size, dtype=torch.uint8, device=device)
        sums = torch.zeros(tensors, numel, dtype=torch.float32, device=device)
        shards, adds = zip(residuals, packets, strict=True), zip(packets, sums, strict=True)
        pack_ms = _median_ms(device, lambda c=codec, s=[*shards]: [c.pack_rows(*x) for x in s])
        add_ms = _median_ms(device, lambda c=codec, a=[*adds]: [c.unpack_add_rows(*x) for x in a])
        row = found[f"{bits} bits"] = {"pack_ms": pack_ms, "unpack_add_ms": add_ms}
        moved = entries * (4 + 4) + packets.numel(), packets.numel() + 8 * sums.numel()
        for kernel, count, nbytes in zip(("pack", "unpack_add"), instructions, moved, strict=True):
            issue_s = count * 4 * entries / 1024 / _instructions_per_s(device)
            row[f"{kernel}_target_ms"] = 1e3 * max(issue_s, nbytes / bandwidth) / REACHED
    return found


def _instructions_per_s(device: torch.device) -> float:
    """Of warps, four a cycle and multiprocessor."""
    card = torch.cuda.get_device_properties(device)
    return 4.0 * card.multi_processor_count * 1e3 * getattr(card, "clock_rate", 1.7e6)


def processes(device: torch.device) -> Found:
    """Two processes, every method, five steps, under torch's sanitizer of streams: over gloo on
    one GPU, and over NCCL if there are two."""
    cuda = device.type == "cuda"
    environment = {"TORCH_CUDA_SANITIZER": "1"} if cuda else {}
    backends = ["gloo", "nccl"] if cuda and torch.cuda.device_count() > 1 else ["gloo"]
    for backend in backends:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--meet", f"{folder}/meet", "--device", device.type, "--backend", backend]
            members = [_python(["--member", str(p), *options], environment) for p in range(2)]
            said = [member.communicate()[0] for member in members]
        for member, words in zip(members, said, strict=True):
            assert member.returncode == 0, words[-4000:]
            assert "CSAN detected" not in words, words[-4000:]
    return {"sanitizer": bool(environment), "methods": len(METHODS), "backends": backends}


def _member(device: torch.device, process: int, meet: str, backend: str) -> None:
    """One of `processes`."""
    if backend == "nccl":
        device = torch.device("cuda", process)
        torch.cuda.set_device(device)
    with _group(device, process, 2, nccl=backend == "nccl", meet=meet):
        for method in METHODS.values():
            exchange = one_process(TorchTransport(), method)
            for step in range(5):
                tensors = [g.to(device) for g in gradients(process, step=step)]
                out = exchange.average([f"p{i}" for i in range(len(tensors))], tensors, 8.0)
                assert not commit(exchange)
                assert all(bool(t.isfinite().all()) for t in out)


def offload(device: torch.device) -> Found:
    """Gradients with inputs in host memory are those without, to the bit, however late copies
    are; with copies beside compute."""
    from ds_ckpt.activation import CheckpointedBlocks
    from ds_ckpt.activation.inputs import CheckpointedInputs
    from ds_ckpt.activation.offload import InputStore, SideStream, copies_for

    rows, width = (4096, 2048) if device.type == "cuda" else (64, 32)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
    model.to(device)
    x = torch.randn(rows, width, device=device)

    def gradients_of() -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients_of()
    copies = copies_for(device)
    if isinstance(copies, SideStream):
        copy = copies.copy

        def late(source: Tensor, target: Tensor) -> Any:
            with torch.cuda.stream(copies._stream):
                torch.cuda._sleep(2_000_000)
            return copy(source, target)

        copies.copy = late  # type: ignore[method-assign]
    store = InputStore(
        torch.empty(0, device=device).device,
        copies,
        owned=[*model.parameters()],
    )
    names = [str(i) for i in range(8)]
    inputs = CheckpointedInputs(store)
    blocks = CheckpointedBlocks(model, names, around=inputs.around)
    for _ in range(3):
        for ours, theirs in zip(gradients_of(), plain, strict=True):
            assert torch.equal(ours, theirs)
    moved = store.counters.out.total()
    blocks.remove()
    assert moved, "nothing was moved"
    return {"moved": moved, "bytes_each": x.nbytes}


class _Drops(nn.Module):
    """Is given an object, a parameter or a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)

    def forward(self, given: Any) -> Tensor:
        out: Tensor = self.drop(torch.sin(self.up(getattr(given, "x", given))))
        return out


def dropout(device: torch.device) -> Found:
    """A recompute draws what the forward drew, whatever holds the tensors that a block is given."""
    from ds_ckpt.activation import CheckpointedBlocks

    wraps: dict[str, Callable[[Tensor], Any]] = {
        "tensor": lambda x: x * 1.0,
        "parameter": nn.Parameter,
        "object": lambda x: SimpleNamespace(x=x),
    }
    blocks = nn.ModuleList(_Drops() for _ in range(3)).to(device)
    x = torch.randn(32, 64, device=device)

    def gradients_of(wrap: Callable[[Tensor], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        blocks.zero_grad()
        torch.stack([block(wrap(x)).square().mean() for block in blocks]).sum().backward()
        return [p.grad.clone() for p in blocks.parameters() if p.grad is not None]

    plain = {name: gradients_of(wrap) for name, wrap in wraps.items()}
    put = CheckpointedBlocks(blocks, ["_Drops"])
    for name, wrap in wraps.items():
        for ours, theirs in zip(gradients_of(wrap), plain[name], strict=True):
            assert torch.equal(ours, theirs), name
    put.remove()
    return {"gradients": len(plain["object"])}


def engine(device: torch.device) -> Found:
    """ZeRO-3 with the plugin in fp16: an overflow is skipped, a resumed run goes on to the bit,
    and nothing is left behind by `destroy`."""
    dtype = "fp16" if device.type == "cuda" else "bf16"
    with _group(device, 0, 1, nccl=device.type == "cuda"), tempfile.TemporaryDirectory() as folder:
        first = _engine(dtype)
        _steps(first, range(3))
        skipped = first.skipped_steps
        if dtype == "fp16":
            _steps(first, range(1), factor=1e30)
            assert first.skipped_steps > skipped, "an overflow was not skipped"
        first.save_checkpoint(folder)
        wanted = _steps(first, range(3, 6))
        first.destroy()
        second = _engine(dtype)
        second.load_checkpoint(folder)
        assert _steps(second, range(3, 6)) == wanted, "a resumed run went another way"
        second.destroy()
    return {"dtype": dtype, "losses": wanted}


def _engine(dtype: str) -> Any:
    import ds_ckpt

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        dtype: {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "ds_ckpt": {
            "activation": {"policy": "block", "modules": ["Linear"], "offload": True},
            "compression": {"method": "quantize", "warmup_steps": 1},
        },
    }
    made, *_ = ds_ckpt.initialize(model=model, config=config)
    return made


def _steps(engine: Any, steps: range, factor: float = 1.0) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step), device="cpu")
        x = x.to(engine.device, next(engine.module.parameters()).dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss * factor)
        engine.step()
        losses.append(float(loss))
    return losses


def tokens(device: torch.device) -> Found:
    """A Llama of two wide layers at 8K and 32K tokens: peak memory and time of a step with policy
    `block`, with its inputs in host memory, and with `auto`."""
    import transformers

    import ds_ckpt

    cuda = device.type == "cuda"
    lengths, hidden = ((8192, 32_768), 2048) if cuda else ((128,), 64)
    found: Found = {}
    ways: dict[str, Found] = {
        "block": {"policy": "block"},
        "block, offload": {"policy": "block", "offload": True, "offload_min_bytes": 0},
        "auto": {"policy": "auto", **({} if cuda else {"budget_gib": 1.0})},
    }
    with _group(device, 0, 1, nccl=cuda):
        for length in lengths:
            for way, section in ways.items():
                torch.manual_seed(0)
                shape = transformers.LlamaConfig(
                    hidden_size=hidden,
                    intermediate_size=3 * hidden,
                    num_hidden_layers=8 if cuda else 2,
                    num_attention_heads=16 if cuda else 4,
                    vocab_size=512,
                    max_position_embeddings=length,
                    use_cache=False,
                )
                config = {
                    "train_micro_batch_size_per_gpu": 1,
                    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
                    "zero_force_ds_cpu_optimizer": False,
                    "bf16": {"enabled": True},
                    "zero_optimization": {"stage": 3},
                    "ds_ckpt": {"activation": section},
                }
                model = transformers.LlamaForCausalLM(shape)
                made, *_ = ds_ckpt.initialize(model=model, config=config)
                batch = torch.randint(0, 512, (1, length), device=made.device)

                def step(made: Any = made, batch: Tensor = batch) -> None:
                    made.backward(made(input_ids=batch, labels=batch).loss)
                    made.step()

                step()
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                row: Found = {"step_ms": _median_ms(device, step, repeats=3)}
                if cuda:
                    row["peak_bytes"] = torch.cuda.max_memory_allocated()
                found[f"{way}, {length} tokens"] = row
                made.destroy()
    return found


CHECKS: dict[str, tuple[Callable[[torch.device], Found], float]] = {
    "versions": (versions, 60),
    "alone": (alone, 60),
    "codecs": (codecs, 90),
    "law3": (law3, 90),
    "waits": (waits, 90),
    "times": (times, 120),
    "processes": (processes, 120),
    "offload": (offload, 60),
    "dropout": (dropout, 60),
    "engine": (engine, 90),
    "tokens": (tokens, 150),
}
"""By name, with a limit in seconds."""


# ---- what they lean on


@contextlib.contextmanager
def _as_is(device: torch.device) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _set(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _tf32(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    before = torch.get_float32_matmul_precision()
    return _set(torch.set_float32_matmul_precision, "high", before)


def _autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _bf16_default(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return _set(torch.set_default_dtype, torch.bfloat16, torch.float32)


def _deterministic(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return _set(torch.use_deterministic_algorithms, True, False)


@contextlib.contextmanager
def _group(
    device: torch.device, process: int, world: int, *, nccl: bool = False, meet: str = ""
) -> Iterator[None]:
    """torch's process group, and DeepSpeed's."""
    import deepspeed

    os.environ |= {"RANK": str(process), "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory() as folder:
        at = f"file://{meet or Path(folder) / 'meet'}"
        backend = "nccl" if nccl else "gloo"
        dist.init_process_group(backend, init_method=at, rank=process, world_size=world)
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _no_waits(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return _set(torch.cuda.set_sync_debug_mode, "error", "default")


@contextlib.contextmanager
def _profiled(device: torch.device) -> Iterator[Callable[[], int]]:
    """Kernels that were launched inside; on a CPU operators."""
    from torch.profiler import ProfilerActivity

    cuda = device.type == "cuda"
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    ) as profiler:
        yield lambda: sum(
            ("LaunchKernel" in event.name) if cuda else event.name.startswith("aten::")
            for event in profiler.events() or ()
        )


def _median_ms(device: torch.device, work: Callable[[], Any], repeats: int = 7) -> float:
    work()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        else:
            began_s = time.perf_counter()
            work()
            found.append(1e3 * (time.perf_counter() - began_s))
    return sorted(found)[repeats // 2]


def _python(options: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_check", *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# ---- running them


def run(name: str, device: torch.device) -> Found:
    """One check in this process: what it found, or how it failed."""
    try:
        found = CHECKS[name][0](device)
        if missed := found.get("missed"):
            return {"ok": False, "error": "; ".join(missed), "found": found}
        return {"ok": True, "found": found}
    except BaseException as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "at": _last_lines()}


def _last_lines() -> str:
    return traceback.format_exc()[-3000:]


def run_apart(name: str, device: torch.device, limit_s: float) -> Found:
    """One check in a process of its own, ended with all that it started when its time is up."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        options = ["--run", name, "--device", device.type, "--json", str(out)]
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_check", *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(timeout=limit_s)
            result: Found = (
                json.loads(out.read_text())
                if out.exists()
                else {"ok": False, "error": f"it ended with status {child.returncode}", "at": said}
            )
        except subprocess.TimeoutExpired:
            result = {"ok": False, "error": f"not done after {limit_s:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, 9)
            child.communicate()
    if not result["ok"] and "at" in result:
        result["at"] = result["at"][-3000:]
    return {**result, "seconds": round(time.perf_counter() - began_s, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--limit-s", type=float, help="of each check, in the place of its own")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of all checks")
    parser.add_argument("--run", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", options.device)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    whole: Found = {"date": date, "device": options.device, "checks": {}}
    if options.device == "cuda" and not torch.cuda.is_available():
        whole["error"] = "no GPU that torch can use; --device cpu rehearses what does not need one"
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
        print(whole["error"])
        return 2
    if options.member is not None:
        _member(device, options.member, options.meet, options.backend)
        return 0
    if options.run:
        result = run(options.run, device)
        options.json.write_text(json.dumps(result))
        return int(not result["ok"])
    checks, end_s = whole["checks"], time.monotonic() + 60 * options.minutes
    print(f"{'check':10}  {'seconds':>7}  result")
    for name in options.only:
        left_s = max(end_s - time.monotonic(), 0.1)
        checks[name] = run_apart(name, device, min(options.limit_s or CHECKS[name][1], left_s))
        options.json.write_text(json.dumps(whole, indent=1) + "\n")  # whatever ends the next one
        words = "ok" if checks[name]["ok"] else f"FAILED: {checks[name]['error'][:200]}"
        print(f"{name:10}  {checks[name]['seconds']:7.1f}  {words}", flush=True)
    print(f"written to {options.json}")
    return int(not all(check["ok"] for check in checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
