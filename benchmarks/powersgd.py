"""PowerSGD beside torch's DDP hook: time of a step, bytes on the wire, what is orthonormal.

    python benchmarks/powersgd.py [--hidden 1024] [--rank 4] [--repeats 9]

First table: the gradients of one Llama block (fp32; 4 square matrices, 3 of the MLP, 2 norms), two
processes with one thread each, gloo. `hook` is torch's `powerSGD_hook` with its defaults (warm
start, error feedback), called as DDP calls it. `ours` is the same algorithm from the parts that
the exchange uses: error feedback, the finiteness check (which the hook lacks), all products,
orthogonalizations and the residual, two collectives, factors in bf16 (two processes). The hook
delivers the whole product to each process; ours, as ZeRO-3 needs, the process's half of it. Calls
take turns; medians of the repeats of process 0, by the clock and of processor time, which leaves
out waiting for the other process and for busy cores. Bytes are those that a process sends: what it
hands to an all-to-all, or half of what a ring's all-reduce moves.

Second table: microseconds of the thread for `orthogonalize`, for torch's `_orthogonalize` of the
same factors (fp32 QR; Gram-Schmidt for ranks 1 and 2), and for torch's Gram-Schmidt. Third: the
largest deviation of U^T U from the identity, U from factors that occur (n/a: not finite).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _timing import interleaved_medians_s
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

from ds_ckpt.compression import Feedback, all_finite, powersgd
from ds_ckpt.exchange.low_rank import FactorSum
from ds_ckpt.exchange.transport import TorchTransport

WORLD = 2


class Wire:
    """Collectives with their bytes and calls counted."""

    def __init__(self) -> None:
        self._all_reduce, self._all_to_all = dist.all_reduce, dist.all_to_all_single
        self.nbytes = self.calls = 0

    def all_reduce(self, tensor: Tensor, **keywords: object) -> object:
        self._count(tensor.nbytes * 2 * (WORLD - 1) // WORLD)
        return self._all_reduce(tensor, **keywords)

    def all_to_all(self, output: Tensor, sent: Tensor, *splits: object, **keywords: object) -> None:
        self._count(sent.nbytes)
        self._all_to_all(output, sent, *splits, **keywords)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.calls += nbytes > 0


class Bucket:
    """The part of DDP's bucket that the hook uses; views of one flat buffer."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        self._flat = torch.zeros(sum(shape.numel() for shape in shapes))
        parts = self._flat.split([shape.numel() for shape in shapes])
        self._views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._views

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Ours:
    """One bucket's step with the parts of `ds_ckpt.compression` and `ds_ckpt.exchange`."""

    def __init__(self, shapes: list[torch.Size], rank: int, wire: Wire) -> None:
        self._shapes, self._feedback = shapes, Feedback()
        self._sum = FactorSum(TorchTransport(None, wire.all_to_all, wire.all_reduce))
        self._low = [
            len(shape) > 1 and powersgd.LowRank(rank).applicable(shape) is not None
            for shape in shapes
        ]
        sizes = [powersgd.matrix_shape(s) for s, low in zip(shapes, self._low, strict=True) if low]
        self._qs = [
            powersgd.initial_factor(str(i), size[1], rank, "cpu") for i, size in enumerate(sizes)
        ]

    def __call__(self, gradients: list[Tensor]) -> list[Tensor]:
        """The process's part of each mean; dense tensors whole."""
        matrices, dense = [], []
        for i, gradient in enumerate(gradients):
            if self._low[i]:
                pending = self._feedback.accumulate(str(i), gradient.view(-1), WORLD)
                assert all_finite(pending)
                matrices.append(pending.view(powersgd.matrix_shape(gradient.shape)))
            else:
                dense.append(gradient.view(-1) / WORLD)
        ps = [
            powersgd.project(matrix, powersgd.orthogonalize(q))
            for matrix, q in zip(matrices, self._qs, strict=True)
        ]
        summed = self._sum.sum([self._sum.rounded(p) for p in ps])
        small = self._sum.sum([self._sum.rounded(d) for d in dense])
        own = [powersgd.orthogonalize(p) for p in summed]
        mine = []
        for matrix, p in zip(matrices, own, strict=True):
            mine.append(self._sum.rounded(powersgd.back_project(matrix, p)))
        self._qs = self._sum.sum(mine)
        delivered = []
        for matrix, p, half, q in zip(matrices, own, mine, self._qs, strict=True):
            powersgd.subtract_product_(matrix, p, half)
            numel, columns = matrix.numel(), matrix.shape[1]
            delivered.append(powersgd.product_entries(p, q, 0, numel // WORLD, columns))
        self._feedback.commit()
        return [*delivered, *small]


def llama_block(hidden: int) -> list[torch.Size]:
    mlp = hidden * 11 // 4
    square, wide, tall = (hidden, hidden), (mlp, hidden), (hidden, mlp)
    return [torch.Size(s) for s in [square] * 4 + [wide] * 2 + [tall] + [(hidden,)] * 2]


def compare(process: int, meeting: str, hidden: int, rank: int, repeats: int) -> None:
    """The first table, on each process; process 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=process, world_size=WORLD)
    torch.manual_seed(process)
    shapes = llama_block(hidden)
    state = hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    state.iter = 2
    bucket, wires = Bucket(shapes), {"hook": Wire(), "ours": Wire()}
    ours = Ours(shapes, rank, wires["ours"])
    gradients = [torch.randn(shape) for shape in shapes]

    def torchs() -> None:
        stock, dist.all_reduce = dist.all_reduce, wires["hook"].all_reduce
        try:
            hook.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
        finally:
            dist.all_reduce = stock

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in wires}
    works: dict[str, Callable[[], object]] = {"hook": torchs, "ours": lambda: ours(gradients)}
    for repeat in range(repeats + 2):
        for name, work in works.items():
            for view, gradient in zip(bucket.gradients(), gradients, strict=True):
                view.copy_(gradient)
            wire = wires[name]
            wire.nbytes = wire.calls = 0
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            work()
            spent = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            if repeat > 1:
                taken[name].append(spent)
    if process == 0:
        numel = sum(shape.numel() for shape in shapes)
        print(f"one Llama block, hidden {hidden}, {numel} entries, rank {rank}, 2 processes")
        for name, times in taken.items():
            clock_s, cpu_s = (statistics.median(column) for column in zip(*times, strict=True))
            wire = wires[name]
            print(
                f"{name}  {clock_s * 1e3:8.2f} ms, processor {cpu_s * 1e3:8.2f} ms = "
                f"{cpu_s / numel * 1e9:5.2f} ns/element  {wire.nbytes:8d} bytes in "
                f"{wire.calls} collectives, {4 * numel / wire.nbytes:5.1f}x under fp32"
            )
        for i, kind in enumerate(("time", "processor time")):
            ratios = [a[i] / b[i] for a, b in zip(taken["hook"], taken["ours"], strict=True)]
            print(f"{kind} of the hook: {statistics.median(ratios):.2f} of ours")
    dist.destroy_process_group()


def by_qr(factor: Tensor) -> Tensor:
    unit = factor.clone()
    hook._orthogonalize(unit.unsqueeze(0))
    return unit


def by_gram_schmidt(factor: Tensor) -> Tensor:
    unit = factor.clone()
    hook._orthogonalize_gram_schmidt(unit.unsqueeze(0))
    return unit


WAYS = {
    "ours": powersgd.orthogonalize,
    "torch's": by_qr,
    "Gram-Schmidt": by_gram_schmidt,
}


def factors() -> dict[str, Tensor]:
    normal = torch.randn(1024, 4)
    uneven = normal * torch.tensor([1e30, 1.0, 1e-20, 1e-38])
    dependent = normal[:, :2] @ torch.randn(2, 4)
    near = normal[:, :1] + 1e-5 * normal
    zero_column = torch.cat([normal[:, :3], torch.zeros(1024, 1)], 1)
    return {
        "normal": normal,
        "columns of other sizes": uneven,
        "nearly parallel": near,
        "dependent": dependent,
        "a column of zeros": zero_column,
        "zeros": torch.zeros(1024, 4),
        "rank 1, zeros": torch.zeros(1024, 1),
        "rank 1, 1e-30": normal[:, :1] * 1e-30,
    }


def deviation(unit: Tensor) -> str:
    wide = unit.double()
    gap = (wide.T @ wide - torch.eye(unit.shape[1])).abs().max()
    return f"{float(gap):14.1e}" if torch.isfinite(gap) else f"{'n/a':>14s}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, 1 thread a process", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        chosen = (meeting, arguments.hidden, arguments.rank, arguments.repeats)
        mp.spawn(compare, args=chosen, nprocs=WORLD)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("\nmicroseconds   " + "".join(f"{name:>14s}" for name in WAYS))
    for rows, rank in ((1024, 1), (1024, 4), (1024, 16), (4096, 4), (4096, 16), (32_000, 4)):
        factor = torch.randn(rows, rank)
        works = {name: (lambda w=way, f=factor: w(f)) for name, way in WAYS.items()}
        medians_s = interleaved_medians_s(works, 4 * arguments.repeats)
        row = "".join(f"{s * 1e6:14.0f}" for s in medians_s.values())
        print(f"{rows:6d} x {rank:<6d}" + row)
    print(f"\n{'|U^T U - I|':24s}" + "".join(f"{name:>14s}" for name in WAYS))
    for kind, factor in factors().items():
        row = "".join(deviation(way(factor)) for way in WAYS.values())
        print(f"{kind:24s}" + row)


if __name__ == "__main__":
    main()
