"""Compressor interface and registry of methods.

A method is one class in one file. Its fields are its settings, the JSON section of its name. Its
class attributes describe it, and its methods count bytes and compress. `register` adds it to the
schema, the rules and the commands. docs/add_a_compressor.md shows how.

A codec turns the rows of an fp32 matrix, one shard a row, into uint8 payloads. A payload's size
depends on the number of entries alone, so sender and receiver compute it independently. Every codec
keeps this contract, elementwise and in fp32: `values before = values after + decoded`. Error
feedback carries `values after` to the next step.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from itertools import product
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ds_ckpt.fields import Expects, Section


class Compressor(ABC):
    """Compression of one tensor. Stateless, and equal on every rank."""

    @property
    def codec(self) -> Codec | None:
        """Codec of the all-to-all; None if the compressor sends nothing from rank to owner."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Return a short description for logs and reports."""

    @abstractmethod
    def sent_bytes(self, shape: torch.Size, world: int, local: int = 1) -> int:
        """Return the bytes that a node sends for a tensor, times (world - 1) / world.

        `world` ranks exchange, nodes with two levels; `local` ranks of a node divide the tensor.
        """

    def applicable(self, shape: torch.Size, local: int = 1) -> Compressor | None:
        """Return this if it saves bytes on such a tensor, else None: uncompressed."""
        return self


class Codec(Compressor):
    """Compressor that packs fp32 shards into payloads of a fixed size.

    Shards of one size are packed together, one a row: more ranks do not need more kernels. In a
    step that will be skipped, values may be inf or NaN. `pack_rows` and `unpack_add_rows` must then
    end without an error.
    """

    @property
    def codec(self) -> Codec:
        """This codec."""
        return self

    @property
    def uses_preconditioner(self) -> bool:
        """True if entries are to be divided by `exchange.metric`'s weights before packing."""
        return False

    @abstractmethod
    def packed_bytes(self, numel: int) -> int:
        """Return the payload size of `numel` entries, a multiple of 8."""

    @abstractmethod
    def pack_rows(self, values: Tensor, out: Tensor) -> None:
        """Write payloads; leave in `values` the part that the receiver will not see.

        Args:
            values: fp32 [rows, n], entries of a row contiguous. The decoded payload is subtracted
                in place.
            out: uint8 [rows, packed_bytes(n)], 8-byte aligned. Every byte is written.
        """

    @abstractmethod
    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add `decoded * scale` of each payload [rows, bytes] to `into` (fp32 [n]) in place."""

    def reduce_rows(self, payloads: Tensor, own: Tensor, scale: float) -> None:
        """Add the payloads of all other ranks to the owner's part, `own`, in place.

        A codec may replace this sum. `own` is this rank's `scale * gradient / world`, and the
        result is `scale` times the mean over ranks. `scale` is the loss scale.
        """
        self.unpack_add_rows(payloads, own, scale)

    def sent_bytes(self, shape: torch.Size, world: int, local: int = 1) -> int:
        """Return the size of the whole tensor's payload."""
        return self.packed_bytes(shape.numel())


class Method(Section):
    """Settings and description of a method; the model of its JSON section.

    A method that is a codec also inherits from `Codec`; another one overrides `build`.

    Attributes:
        name: name in the configuration, and of the section.
        about: one clause for the schema.
        example: example of a section, as JSON.
        lossless: everything is sent: no residuals, no warm-up, no guard.
        least_dims: fewest dimensions of a tensor that it takes.
        sparse: method for embeddings with many rows, of which a batch touches few, unless a rule
            decides otherwise.
        presets: settings that `ds-ckpt measure` has a name for: sections by name.
        titles: display names of presets; default: the name.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    example: ClassVar[str] = "{}"
    lossless: ClassVar[bool] = False
    least_dims: ClassVar[int] = 1
    sparse: ClassVar[str | None] = None
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    titles: ClassVar[Mapping[str, str]] = {}

    def build(self) -> Compressor | None:
        """Return the compressor of these settings; None: tensors are sent uncompressed."""
        assert isinstance(self, Codec), "a method that is no codec builds its compressor"
        return self

    @classmethod
    def depends_on(cls) -> tuple[str, ...]:
        """Return the names of all sections that it may read."""
        own = (cls.name,) if cls.model_fields else ()
        return (*own, cls.sparse) if cls.sparse else own


AnyMethod = TypeVar("AnyMethod", bound=type[Method])
ENTRY_POINTS = "ds_ckpt.compressors"
_registered: dict[str, type[Method]] = {}


def register(method: AnyMethod) -> AnyMethod:
    """Register a method, also as a decorator; call it before `initialize` on every rank."""
    name = getattr(method, "name", "")
    known = _registered.get(name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in ("none", "auto"):
        raise ValueError(f"{method.__name__}: {name!r} cannot be the name of a method")
    if known is not None and _path(known) != _path(method):
        raise ValueError(f"{name!r} is already the name of {_path(known)}")
    for key, field in cast("type[Method]", method).model_fields.items():
        described = field.description and any(isinstance(m, Expects) for m in field.metadata)
        if field.is_required() or not described:
            raise ValueError(f"{name}.{key} needs a default, Expects(...) and a description")
    missing = sorted(getattr(method, "__abstractmethods__", ()))
    if missing or not isinstance(getattr(method, "about", None), str):
        lacks = ", ".join(missing) or "about"
        raise ValueError(f"{name} lacks {lacks}: see docs/add_a_compressor.md")
    if issubclass(method, Codec) and not method.__module__.startswith("ds_ckpt."):
        _check_codec(cast("type[Method]", method)())
    _registered[name] = method
    return method


def _check_codec(codec: Any) -> None:
    """Raise ValueError if a codec breaks its contract on rows of a few lengths.

    The last row is all zeros, or not finite, as in a step that will be skipped.
    """
    if codec.uses_preconditioner and type(codec).reduce_rows is not Codec.reduce_rows:
        raise ValueError(f"{codec.name}: uses_preconditioner excludes a reduce_rows of its own")
    for numel, last in product((1, 7, 1000), (0.0, math.inf, math.nan)):
        size = codec.packed_bytes(numel)
        if size % 8:
            raise ValueError(f"{codec.name}.packed_bytes({numel}) is {size}, no multiple of 8")
        before = torch.linspace(-1, 2, 3 * numel, dtype=torch.float32, device="cpu").view(3, numel)
        before[2] = last
        after, again, reduced = before.clone(), before.clone(), before.clone()
        out = torch.full((3, size), 0x55, dtype=torch.uint8, device="cpu")
        other = torch.full_like(out, 0xAA)
        decoded = torch.zeros_like(before)
        try:
            codec.pack_rows(after, out)
            codec.pack_rows(again, other)
            for row, into, own in zip(out, decoded, reduced, strict=True):
                codec.unpack_add_rows(row[None], into)
                codec.reduce_rows(row[None], own, 1.0)
        except Exception as error:
            raise ValueError(
                f"{codec.name} fails on the CPU with {numel} entries, last row {last}: {error}"
            ) from error
        if not math.isfinite(last):
            continue
        if not out.equal(other):
            found = "wrote different bytes: some are unwritten, or random"
            raise ValueError(f"{codec.name}.pack_rows: two calls with {numel} entries {found}")
        results = {"pack_rows": after, "unpack_add_rows": decoded, "reduce_rows": reduced}
        for name, result in results.items():
            if not result.isfinite().all():
                why = f"gives inf or NaN for finite rows of {numel} entries, one of them all zeros"
                raise ValueError(f"{codec.name}.{name} {why}")
        if not torch.allclose(after + decoded, before, atol=1e-5):
            raise ValueError(
                f"{codec.name}.pack_rows loses a part of {numel} entries: values after it plus the "
                "decoded payload are not the values before"
            )


def _path(method: type[Method]) -> str:
    return f"{method.__module__}.{method.__qualname__}"


def unregister(name: str) -> None:
    """Remove a method, for tests."""
    _registered.pop(name, None)


def methods() -> Mapping[str, type[Method]]:
    """Return every method by name: built-in ones, then others in the order of registration."""
    _load_entry_points()
    return dict(_registered)


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        try:
            register(point.load())
        except Exception as error:
            package = point.dist.name if point.dist is not None else "another package"
            raise ValueError(
                f"the compressor {point.name!r} of {package} ({point.value}) cannot be loaded: "
                f"{error}"
            ) from error


def on_host(device: torch.device) -> bool:
    """Return whether an operator has ended when its call returns: the host never waits."""
    return device.type == "cpu"


def row_groups(numel: int, limit: int, *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """Split tensors of equally many rows into groups of at most `limit` entries, `numel` a row."""
    step = max(1, limit // max(numel, 1))
    if step >= tensors[0].shape[0]:
        return iter([tensors])
    return zip(*(t.split(step) for t in tensors), strict=True)


def add_rows(into: Tensor, decoded: Tensor, scale: float) -> None:
    """Add `row * scale` of each row to `into`, in place."""
    if decoded.shape[0] > 1 and not on_host(into.device):
        decoded = decoded.sum(0, keepdim=True)
    for row in decoded.unbind():
        into.add_(row if scale == 1.0 else row * scale)
