"""PowerSGD: a gradient matrix as the product of two thin factors (Vogels et al., arXiv 1905.13727).

With a matrix M [m, n], summed over ranks, and q [n, r] from the step before (warm start):

    p = M q                 all-reduced, then orthogonalized
    q = M^T p               all-reduced
    sent = p q^T            M - p q^T is the residual

p is orthonormal, so p q^T is the projection of M on the span of p. The residual never has more
energy than M. This file has the settings, the arithmetic and the state; `exchange.low_rank` has the
sums over ranks.

Each rank orthogonalizes the summed factor and must get what the others get. Machines may round
differently, but two things keep the results within rounding of each other. The diagonal of R is
positive, which makes the decomposition unique. A column that depends on those before it would hold
only rounding errors, so a fixed direction replaces it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ds_ckpt.compression.base import Compressor, Method, on_host
from ds_ckpt.fields import Expects, Removed

# A smaller part of a column, relative to the columns before it, counts as rounding of fp32.
_DEPENDENT = 2.0**-18
_GATHERED_BELOW = 4
_SAVED = "right:"


class PowerSGD(Method):
    """PowerSGD: two factors of each matrix are sent in its place."""

    name = "powersgd"
    about = "low-rank factors of each matrix; fewest bytes for wide matrices, and it costs loss"
    example = '{"rank": 16}'
    least_dims = 2
    sparse = "topk"
    presets = {"powersgd": {"powersgd": {"rank": 4}}}
    titles = {"powersgd": "PowerSGD rank 4"}
    removed = {
        "alternate": Removed(
            "both factors are sent in every step", "remove it; lower rank", constant=False
        )
    }

    rank: Annotated[int, Expects("a whole number from 1 to 1024", "16")] = Field(
        default=16,
        ge=1,
        le=1024,
        description="Columns of each factor. A rows x columns matrix sends rank * (rows + columns) "
        "numbers. Higher is more bytes, more compute and a lower loss; what a model needs "
        "grows with its width.",
    )

    def build(self) -> LowRank:
        """Return the compressor of these settings."""
        return LowRank(self.rank)


@dataclass(frozen=True)
class LowRank(Compressor):
    """Compression of a tensor, taken as a matrix, to two factors of `rank` columns."""

    rank: int

    def describe(self) -> str:
        """Return the rank."""
        return f"PowerSGD rank {self.rank}"

    def applicable(self, shape: torch.Size, local: int = 1) -> Compressor | None:
        """Return this if both factors in fp32 are fewer bytes than a 16-bit reduce-scatter.

        On a ring an all-reduce sends each byte twice, a reduce-scatter once. `local` parts of the
        rows have a right factor each. Implies that the rank is less than rows and columns.
        """
        rows, columns = matrix_shape(shape)
        return self if 4 * self.rank * (rows + local * columns) < rows * columns else None

    def sent_bytes(self, shape: torch.Size, world: int, local: int = 1) -> int:
        """Return the bytes sent; each of the `local` ranks has its own right factor."""
        rows, columns = matrix_shape(shape)
        return (2 * world if gathers(world) else 8) * self.rank * (rows + local * columns)


def gathers(world: int) -> bool:
    """Return whether `world` ranks exchange factors in bf16 instead of an all-reduce in fp32.

    A ring's all-reduce sends 8 (W - 1) / W bytes an fp32 entry. An all-to-all of bf16 sends
    2 (W - 1), fewer if W is 2 or 3.
    """
    return 1 < world < _GATHERED_BELOW


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (rows, columns) of the row-major matrix that a tensor is taken for.

    The split of the dimensions with the smallest rows + columns, the first of equals; a vector is
    one row.
    """
    if len(shape) < 2:
        return 1, shape.numel()
    splits = ((math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape)))
    return min(splits, key=lambda split: split[0] + split[1])


def initial_factor(name: str, columns: int, rank: int, device: torch.device | str) -> Tensor:
    """Return the q of a first step: fp32 [columns, rank], orthonormal, equal on all devices."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(columns, rank, generator=generator, dtype=torch.float32, device="cpu")
    return orthogonalize(drawn).to(device, non_blocking=True)


def orthogonalize(factor: Tensor) -> Tensor:
    """Apply `orthogonalize_all` to one factor [n, r]."""
    return orthogonalize_all([factor])[0]


def orthogonalize_all(factors: Sequence[Tensor]) -> list[Tensor]:
    """Return orthonormal columns with the span of each factor: fp32 [n, r], r <= n.

    Column j spans, with those before it, what the first j columns of the factor span. Columns that
    are zero, or depend on those before them, become directions outside of that span. They are the
    same for the same span. Factors of one shape share their operators.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for i, factor in enumerate(factors):
        by_shape.setdefault(factor.shape, []).append(i)
    units: dict[int, Tensor] = {}
    for indices in by_shape.values():
        batch = _cholesky_qr(torch.stack([factors[i] for i in indices]))
        units |= dict(zip(indices, batch.unbind(), strict=True))
    return [units[i] for i in range(len(factors))]


def _cholesky_qr(factors: Tensor) -> Tensor:
    """Orthogonalize [b, n, r] by repeated CholeskyQR (Yamamoto et al. 2015) in fp64.

    Columns are normalized first; dependent ones are replaced.
    """
    wide = factors.double()
    if factors.numel() == 0:
        return wide.float()
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    unit = wide.div(norms.masked_fill(norms == 0, 1.0))
    # The pivots are squares of the parts that are new. Dependent columns have none: the summand
    # keeps rounding from making it negative, and is far below the limit of a part.
    lower = torch.linalg.cholesky_ex(_gram(unit, added=_DEPENDENT**2 / 128)).L
    new = lower.diagonal(dim1=1, dim2=2)
    dependent = (new <= _DEPENDENT).unsqueeze(1) | (norms == 0)
    if not on_host(factors.device) or bool(dependent.any()):  # an accelerator would have to wait
        unit = torch.where(dependent, _directions(unit), unit)
    for _ in range(3):  # the third for columns that nearly depend on each other
        lower = torch.linalg.cholesky_ex(_gram(unit)).L
        unit = torch.linalg.solve_triangular(lower.mT, unit, upper=True, left=False)
    return unit.float()


def _gram(unit: Tensor, added: float = 0.0) -> Tensor:
    gram = unit.mT @ unit
    gram.diagonal(dim1=1, dim2=2).add_(added)
    return gram


def _directions(like: Tensor) -> Tensor:
    """Return fp64 [n, r], unit columns that lie in no span that a factor is likely to have."""
    _, rows, columns = like.shape
    at = torch.arange(1, rows * columns + 1, dtype=torch.float64, device=like.device)
    # pseudo-random without a generator's state: digits far behind the point of a sine
    drawn = at.mul_(12.9898).sin_().mul_(43758.5453).frac_().view(columns, rows).t()
    return torch.nn.functional.normalize(drawn, dim=0, eps=0.0)


@contextmanager
def _full_precision(on: Tensor) -> Iterator[None]:
    """Multiply fp32 as fp32 inside: the rounding of TF32 or bf16 would be lost to the residual."""
    backend: Any = torch.backends.mkldnn if on_host(on.device) else torch.backends.cuda
    matmul: Any = getattr(backend, "matmul", None)
    before = getattr(matmul, "fp32_precision", None)
    if before in (None, "none", "ieee"):
        yield
        return
    try:
        matmul.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision = before


def project(matrix: Tensor, q: Tensor) -> Tensor:
    """Return `matrix @ q`, fp32 [m, n] and [n, r]."""
    with _full_precision(matrix):
        return torch.mm(matrix, q)


def back_project(matrix: Tensor, p: Tensor) -> Tensor:
    """Return `matrix.T @ p`, fp32 [m, n] and [m, r], contiguous."""
    # reads the matrix along its rows: 2 to 3 times as fast on a CPU
    with _full_precision(matrix):
        return torch.mm(p.t(), matrix).t().contiguous()


def subtract_product_(matrix: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Subtract `p @ q.T` from `matrix` in place: fp32 [m, n], [m, r], [n, r]."""
    with _full_precision(matrix):
        return matrix.addmm_(p, q.t(), alpha=-1.0)


def product_entries(p: Tensor, q: Tensor, start: int, stop: int, columns: int) -> Tensor:
    """Return entries `start` to `stop` of `p @ q.T`, flattened row-major: contiguous.

    fp32 [m, r] and [columns, r] to [stop - start]; `start` need not begin a row. Equal to what
    `subtract_product_` subtracts to fp32 rounding, not bitwise.
    """
    first_row, last_row = start // columns, -(-stop // columns)
    if stop <= start:
        return p.new_empty(0)
    with _full_precision(p):
        rows = torch.mm(p[first_row:last_row], q.t())
    return rows.view(-1)[start - first_row * columns : stop - first_row * columns]


class Factors:
    """PowerSGD's state: the summed right factor that was sent last, by parameter name.

    The tensor's next approximation starts from it. Transactional like `error_feedback`, and equal
    on all ranks that exchange.
    """

    def __init__(self) -> None:
        self._committed: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """Return q, fp32 [columns, rank], of this step if it sent one already."""
        return self._pending.get(name, self._committed.get(name))

    def put(self, name: str, factor: Tensor) -> None:
        """Record the summed q of this step; `factor` is not copied."""
        self._pending[name] = factor

    def commit(self) -> None:
        """Keep the factors of this step."""
        self._committed.update(self._pending)
        self._pending.clear()

    def rollback(self) -> None:
        """Drop the factors of this step."""
        self._pending.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return committed factors by `right:name`."""
        return {_SAVED + name: factor for name, factor in self._committed.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace every factor by a copy; drop left factors, which earlier releases saved."""
        self._committed = {
            key.removeprefix(_SAVED): factor.detach().clone()
            for key, factor in state.items()
            if key.startswith(_SAVED)
        }
        self._pending.clear()
