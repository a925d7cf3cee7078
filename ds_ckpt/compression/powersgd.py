"""PowerSGD: a gradient matrix as the product of two thin factors, as in Vogels et al., NeurIPS 2019
(arXiv 1905.13727), algorithm 1.

Of a matrix M [m, n], summed over processes, with q [n, r] left from the step before (warm start),

    p = M q                 all-reduced, then orthogonalized
    q = M^T p               all-reduced
    sent = p q^T            M - p q^T stays behind as residual

One such step is one step of the power iteration for the subspace of the r largest singular values.
As p is orthonormal, p q^T is the projection of M on the span of p: what stays behind never has more
energy than M. Alternation (ACP-SGD, Zhang et al., ICDCS 2023, arXiv 2306.08881) computes p in one
step, for the q of the last one orthogonalized, and q for the orthogonalized p in the next: the same
functions, one all-reduce a step instead of two, half the bytes.

Here are its settings, its parts and its memory, without network; who sums what, and when, is
decided in `exchange.low_rank`. Each process orthogonalizes the summed factor on its own and must
get what the others get. The factor is the same bits everywhere, so equal machines do. On machines
of different makes, whose QR rounds differently, two things keep the results within rounding of each
other: the diagonal of R is made positive, which makes the decomposition unique; and a column that
depends on those before it, of which rounding errors alone would be left, is replaced by a direction
that these determine.

Householder reflections (LAPACK, cuSOLVER) in fp64: squares of fp32 numbers neither over- nor
underflow there, so no scaling is needed. `benchmarks/powersgd.py` has torch's DDP hook beside it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from ds_ckpt.compression.base import Compressor, Method, on_host
from ds_ckpt.fields import SWITCH, Expects

# A smaller part of a column, new against the columns before it, counts as rounding. 8 epsilons of
# fp32: a column that was summed and rounded carries several by itself.
_DEPENDENT = 2.0**-20
_GATHERED_BELOW = 4
_BLOCK = 1 << 20
"""Entries that are multiplied in fp64 at a time."""

Side = Literal["left", "right"]


class PowerSGD(Method):
    """PowerSGD: two factors of each matrix travel in its place, its rank the size of both."""

    name = "powersgd"
    about = "low-rank factors of each matrix; fewest bytes for wide matrices, and it costs loss"
    example = '{"rank": 16}'
    least_dims = 2
    sparse = "topk"
    presets = {"powersgd": {"powersgd": {"rank": 4}}}
    aliases = {"r": "rank", "matrix_approximation_rank": "rank"}

    rank: Annotated[int, Expects("a whole number from 1 to 1024", "16")] = Field(
        default=16,
        ge=1,
        le=1024,
        description="Columns of each factor. A rows x columns matrix sends rank * (rows + columns) "
        "numbers. Higher is more bytes, more compute and a lower loss; what a model needs "
        "grows with its width.",
    )
    alternate: Annotated[bool, SWITCH] = Field(
        default=False,
        description="Send only one of the two factors a step, in turns (ACP-SGD): half the bytes, "
        "one collective less, two thirds of the compute; it follows the gradient more slowly.",
    )

    def build(self) -> LowRank:
        return LowRank(self.rank, self.alternate)


@dataclass(frozen=True)
class LowRank(Compressor):
    """A tensor as a matrix, of which two factors travel.

    Attributes:
        rank: columns of each factor, lowered to the matrix's smaller side.
        alternate: only one factor travels a step, the two in turns (ACP-SGD): half the bytes and
            one collective less, for an approximation that follows the gradient more slowly.
    """

    rank: int
    alternate: bool = False

    def words(self) -> str:
        turns = ", P and Q in turns" if self.alternate else ""
        return f"PowerSGD rank {self.rank}{turns}"

    def suited(self, shape: torch.Size, local: int = 1) -> Compressor | None:
        """Factors that are no smaller than the matrix are left out."""
        fits = worthwhile(*matrix_shape(shape), self.rank, local)
        return self if fits else None

    def sent_bytes(self, shape: torch.Size, world: int, local: int = 1) -> int:
        """As of any compressor; each of the `local` processes that divide the rows among them has a
        right factor of its own."""
        left, right = factor_numels(*matrix_shape(shape), self.rank)
        factors = sent_entry_bytes(world) * (left + local * right)
        return factors // 2 if self.alternate else factors


def gathers(world: int) -> bool:
    """Whether so many processes send each other factors in bf16 instead of an all-reduce in fp32.

    A ring's all-reduce sends 8 (W - 1) / W bytes an fp32 entry, everybody's own entries in bf16 to
    everybody 2 (W - 1): fewer where W is 2 or 3.
    """
    return 1 < world < _GATHERED_BELOW


def sent_entry_bytes(world: int) -> int:
    """Bytes an entry of a factor, times (world - 1) / world for what a process sends of it."""
    return 2 * world if gathers(world) else 8


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, columns) of the row-major matrix that a tensor is taken for.

    Of all splits of the dimensions into two consecutive groups the one with the smallest
    rows + columns, the first of equals; 2-D tensors are what they are, others of fewer dimensions
    one row.
    """
    if len(shape) < 2:
        return 1, shape.numel()
    splits = ((math.prod(shape[:at]), math.prod(shape[at:])) for at in range(1, len(shape)))
    return min(splits, key=lambda split: split[0] + split[1])


def factor_numels(rows: int, columns: int, rank: int) -> tuple[int, int]:
    """Entries of p and of q."""
    return rows * rank, columns * rank


def worthwhile(rows: int, columns: int, rank: int, local: int = 1) -> bool:
    """Whether both factors in fp32, all-reduced, are fewer bytes than a 16-bit reduce-scatter.

    On a ring an all-reduce sends each byte twice, a reduce-scatter once: 8 bytes an entry of the
    factors against 2 an entry of the matrix. Implies that `rank` is less than rows and columns.

    Args:
        local: parts that the rows are divided into, each with a right factor of its own.
    """
    return rank >= 1 and 4 * rank * (rows + local * columns) < rows * columns


def initial_factor(name: str, columns: int, rank: int, device: torch.device | str) -> Tensor:
    """The q of a first step: fp32 [columns, rank], orthonormal, a function of the arguments alone.

    `rank` is at most `columns`. Computed on the CPU, so that devices agree.
    """
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(columns, rank, generator=generator, dtype=torch.float32, device="cpu")
    return orthogonalize(drawn).to(device, non_blocking=True)


def orthogonalize(factor: Tensor) -> Tensor:
    """Orthonormal columns whose span holds those of `factor`, to the rounding of fp32 input.

    Column j spans, with those before it, what the first j columns of `factor` span. Columns that
    are zero, or depend on those before them, become directions outside of that span, which are the
    same for the same span. Any finite input will do; nothing is read back but, on a CPU, whether a
    column was dependent.

    Args:
        factor: [n, r], r <= n, floating, finite. Not changed.

    Returns:
        fp32 [n, r].
    """
    if factor.numel() == 0:
        return factor.float()
    wide = factor.double()
    unit, upper = torch.linalg.qr(wide)
    dependent = upper.diagonal().abs() <= _DEPENDENT * upper.norm(dim=0)
    # An accelerator would have to be waited for to know whether there are any.
    if not on_host(factor.device) or bool(dependent.any()):
        # The reflection for a zero column is the identity: what was rounding errors becomes the
        # image of a unit vector under the reflections before.
        unit, upper = torch.linalg.qr(wide.masked_fill(dependent, 0.0))
    positive: Tensor = unit.mul_(torch.where(upper.diagonal() < 0, -1.0, 1.0))
    return positive.float()


def orthogonalize_all(factors: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonalize` of each. On an accelerator those of one shape together, by Cholesky's
    factorization of their products with themselves instead of a QR, which works column by column.
    """
    if not factors or on_host(factors[0].device):
        return [orthogonalize(factor) for factor in factors]
    by_shape: dict[torch.Size, list[int]] = {}
    for i, factor in enumerate(factors):
        by_shape.setdefault(factor.shape, []).append(i)
    units: dict[int, Tensor] = {}
    for places in by_shape.values():
        together = _cholesky_qr(torch.stack([factors[i] for i in places]))
        units |= dict(zip(places, together.unbind(), strict=True))
    return [units[i] for i in range(len(factors))]


def _cholesky_qr(factors: Tensor) -> Tensor:
    """`orthogonalize` of fp32 [b, n, r]: CholeskyQR2 (Yamamoto et al. 2015) in fp64, of columns of
    length 1, in the place of dependent ones first a direction that is the same for all."""
    if factors.numel() == 0:
        return factors
    wide = factors.double()
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    unit = wide.div(norms.masked_fill(norms == 0, 1.0))
    # The pivots are squares of the parts that are new. Dependent columns have none: what is added
    # keeps rounding from making it negative, and lies far below what counts as a part.
    lower = torch.linalg.cholesky_ex(_gram(unit, added=_DEPENDENT**2 / 8)).L
    new = lower.diagonal(dim1=1, dim2=2)
    dependent = (new <= _DEPENDENT).unsqueeze(1) | (norms == 0)
    unit = torch.where(dependent, _directions(unit), unit)
    for _ in range(2):
        lower = torch.linalg.cholesky_ex(_gram(unit)).L
        unit = torch.linalg.solve_triangular(lower.mT, unit, upper=True, left=False)
    return unit.float()


def _gram(unit: Tensor, added: float = 0.0) -> Tensor:
    """`unit.T @ unit`, and so much on its diagonal."""
    gram = unit.mT @ unit
    gram.diagonal(dim1=1, dim2=2).add_(added)
    return gram


def _directions(like: Tensor) -> Tensor:
    """fp64 [n, r], columns of length 1 that lie in no span that a factor is likely to have."""
    _, rows, columns = like.shape
    at = torch.arange(1, rows * columns + 1, dtype=torch.float64, device=like.device)
    # as good as random, and made where it is needed: far behind the point of a sine
    drawn = at.mul_(12.9898).sin_().mul_(43758.5453).frac_().view(columns, rows).t()
    return torch.nn.functional.normalize(drawn, dim=0, eps=0.0)


@contextmanager
def _exact(on: Tensor) -> Iterator[None]:
    """Products inside are of fp32 numbers as they are, whatever the program allows its own: what
    TF32 rounds would be lost to the residual.

    The setting is the whole program's. On an accelerator nothing else multiplies meanwhile: an
    exchange runs in the thread of backward there. On the host backward goes on beside an exchange,
    and so its setting stays as it is.
    """
    matmul: Any = getattr(torch.backends.cuda, "matmul", None)
    before = getattr(matmul, "fp32_precision", None)  # without it torch is too old, as is said
    if on_host(on.device) or before in (None, "none", "ieee"):
        yield
        return
    try:
        matmul.fp32_precision = "ieee"
        yield
    finally:
        matmul.fp32_precision = before


def _row_blocks(matrix: Tensor) -> list[slice]:
    """Blocks to multiply in fp64 where the host would round factors to bf16; else none."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    exact = getattr(matmul, "fp32_precision", "ieee") in ("none", "ieee")
    if exact or not on_host(matrix.device):
        return []
    rows, columns = matrix.shape
    each = max(1, _BLOCK // max(1, columns))
    return [slice(first, first + each) for first in range(0, rows, each)]


def project(matrix: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """`matrix @ q`: fp32 [m, n] and [n, r] into `out`, fp32 [m, r], which is returned."""
    if blocks := _row_blocks(matrix):
        wide = q.double()
        for rows in blocks:
            out[rows] = matrix[rows].double() @ wide
        return out
    with _exact(matrix):
        return torch.mm(matrix, q, out=out)


def back_project(matrix: Tensor, p: Tensor, out: Tensor) -> Tensor:
    """`matrix.T @ p`: fp32 [m, n] and [m, r] into `out`, fp32 [n, r], which is returned."""
    if blocks := _row_blocks(matrix):
        wide = torch.zeros_like(out, dtype=torch.float64)
        for rows in blocks:
            wide.addmm_(matrix[rows].double().t(), p[rows].double())
        return out.copy_(wide)
    # reads the matrix along its rows: 2 to 3 times as fast on a CPU as writing `out` at once
    with _exact(matrix):
        return out.copy_(torch.mm(p.t(), matrix).t())


def subtract_product_(matrix: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """`matrix -= p @ q.T` in place: fp32 [m, n], [m, r], [n, r]."""
    if blocks := _row_blocks(matrix):
        wide = q.double().t()
        for rows in blocks:
            matrix[rows] -= (p[rows].double() @ wide).float()
        return matrix
    with _exact(matrix):
        return matrix.addmm_(p, q.t(), alpha=-1.0)


def product_entries(p: Tensor, q: Tensor, start: int, stop: int, columns: int) -> Tensor:
    """Entries `start` to `stop` of `p @ q.T`, flattened row-major, without forming the others.

    At most the rest of the first and of the last row is computed beside them. Equal to what
    `subtract_product_` subtracts to fp32 rounding, not bitwise: products of other sizes may be
    summed in another order.

    Args:
        p: fp32 [m, r].
        q: fp32 [columns, r].
        start, stop: 0 <= start <= stop <= m * columns; neither needs to begin a row.

    Returns:
        fp32 [stop - start], contiguous.
    """
    first_row, last_row = start // columns, -(-stop // columns)
    if stop <= start:
        return p.new_empty(0)
    left = p[first_row:last_row]
    rows = left.new_empty(len(left), columns)
    if blocks := _row_blocks(rows):
        wide = q.double().t()
        for part in blocks:
            rows[part] = left[part].double() @ wide
    else:
        with _exact(left):
            torch.mm(left, q.t(), out=rows)
    return rows.view(-1)[start - first_row * columns : stop - first_row * columns]


class Factors:
    """PowerSGD's memory: by parameter name the factor that was sent last, and which of the two.

    The tensor's next approximation starts from it. Transactional as `error_feedback` is: `rollback`
    leaves every committed factor bit-equal. Equal on all processes that exchange, because it comes
    out of their all-reduce.
    """

    def __init__(self) -> None:
        self._committed: dict[str, tuple[Side, Tensor]] = {}
        self._pending: dict[str, tuple[Side, Tensor]] = {}

    def get(self, name: str) -> tuple[Side, Tensor] | None:
        """Side and fp32 [rows or columns, rank], of this step if it sent one already."""
        return self._pending.get(name) or self._committed.get(name)

    def put(self, name: str, side: Side, factor: Tensor) -> None:
        """The summed factor that this step sent; `factor` is kept, not copied."""
        self._pending[name] = (side, factor)

    def commit(self) -> None:
        """The step was taken."""
        self._committed.update(self._pending)
        self._pending.clear()

    def rollback(self) -> None:
        """The step was skipped."""
        self._pending.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Committed factors as `left:name` or `right:name`."""
        return {f"{side}:{name}": factor for name, (side, factor) in self._committed.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace every factor by a copy; a step under way is forgotten."""
        loaded: dict[str, tuple[Side, Tensor]] = {}
        for key, factor in state.items():
            side, _, name = key.partition(":")
            loaded[name] = (cast(Side, side), factor.detach().clone())
        self._committed = loaded
        self._pending.clear()
