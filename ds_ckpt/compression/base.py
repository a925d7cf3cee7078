"""What a compressor is, and the registry that everything else asks about them.

A method is one class, in one file: its fields are its settings, which the JSON section of its name
holds; its class attributes say what it is called, what it looks at, and what it gives up; its
methods count bytes and do the work. `register` makes it known to the schema, the rules, the plan
and the commands. A package of its own registers through the entry points `ds_ckpt.compressors`.

A codec works on one flat fp32 tensor (a shard) and one uint8 payload whose size depends on the
number of elements alone, so that sender and receiver compute it without talking. The contract that
every codec keeps, elementwise and in fp32: `values before = values after + decoded`. What it left
behind is carried by `error_feedback`. Shards of one size go through a codec together, a row each:
an accelerator is given as many kernels for many processes as for two.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ds_ckpt.compression.fused import Kernels, ToAdd
from ds_ckpt.fields import Expects, Section


class Compressor(ABC):
    """How one tensor travels. Stateless; equal on every process."""

    @property
    def codec(self) -> Codec | None:
        """Packs what each owner gets; None: nothing goes from process to owner."""
        return None

    @abstractmethod
    def words(self) -> str:
        """What it is, for people."""

    @abstractmethod
    def sent_bytes(self, shape: torch.Size, world: int, local: int = 1) -> int:
        """What a host sends for a tensor, times (world - 1) / world.

        Args:
            world: processes that exchange: hosts, with two levels.
            local: processes of a host that divide the tensor among them.
        """

    def suited(self, shape: torch.Size, local: int = 1) -> Compressor | None:
        """This where it is worth its bytes for such a tensor, else None: uncompressed."""
        return self


class Codec(Compressor):
    """Turns a flat fp32 shard into a payload and back."""

    @property
    def codec(self) -> Codec:
        return self

    @property
    def in_steps(self) -> bool:
        """Whether it wants entries in the metric of the optimizer's steps: `exchange.metric`."""
        return False

    @abstractmethod
    def packed_bytes(self, numel: int) -> int:
        """Size of the payload for `numel` elements, a multiple of 8. Does no work."""

    @abstractmethod
    def pack(self, values: Tensor, out: Tensor) -> None:
        """Write the payload; leave in `values` what the receiver will not see.

        Args:
            values: fp32 [n], contiguous, finite. The decoded payload is subtracted in place.
            out: uint8 [packed_bytes(n)], 8-byte aligned. Every byte is written.
        """

    @abstractmethod
    def unpack_add(self, payload: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """Add `decoded * scale` to `into` (fp32 [n], contiguous) in place."""

    def pack_rows(self, values: Tensor, out: Tensor) -> None:
        """`pack` of each row: fp32 [rows, n] to uint8 [rows, packed_bytes(n)].

        Where a step will be skipped values may be inf or NaN, which nobody has read yet.
        """
        values.nan_to_num_(0.0, 0.0, 0.0)
        for row, payload in zip(values.unbind(), out.unbind(), strict=True):
            self.pack(row, payload)

    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None:
        """`unpack_add` of each row, to the same [n]; on the CPU in their order."""
        for payload in payloads.unbind():
            self.unpack_add(payload, into, scale)

    def pack_all(self, shards: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`pack_rows` of each: a bucket's tensors."""
        for values, out in shards:
            self.pack_rows(values, out)

    def unpack_add_all(self, shards: Sequence[ToAdd], scale: float = 1.0, before: int = 0) -> None:
        """`unpack_add_rows` of each; `own` is added behind the first `before` rows."""
        for shard in shards:
            if before:
                self.unpack_add_rows(shard.payloads[:before], shard.into, scale)
            if shard.own is not None:
                shard.into.add_(shard.own)
            if before < len(shard.payloads):
                self.unpack_add_rows(shard.payloads[before:], shard.into, scale)

    def kernels(self, device: torch.device) -> Kernels | None:
        """What packs and unpacks all tensors of a bucket there at once; None: it has no such."""
        return None

    def sent_bytes(self, shape: torch.Size, world: int, local: int = 1) -> int:
        return self.packed_bytes(shape.numel())


class RowCodec(Codec):
    """A codec whose kernels take all rows at once. Finite or not: it must end without an error."""

    @abstractmethod
    def pack_rows(self, values: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def unpack_add_rows(self, payloads: Tensor, into: Tensor, scale: float = 1.0) -> None: ...

    def pack(self, values: Tensor, out: Tensor) -> None:
        self.pack_rows(values.unsqueeze(0), out.unsqueeze(0))

    def unpack_add(self, payload: Tensor, into: Tensor, scale: float = 1.0) -> None:
        self.unpack_add_rows(payload.unsqueeze(0), into, scale)


class Method(Section):
    """A method's settings: the model of the JSON section of its name, and what is known of it.

    A method that is a codec inherits from `Codec` too; another one overrides `build`.

    Attributes:
        name: in the configuration, and of its section.
        about: one clause for the schema.
        example: of a section, as JSON.
        lossless: everything is sent: no residuals, no warm-up, no guard.
        least_dims: tensors of fewer dimensions cannot travel by it.
        sparse: the method by which it sends embeddings with many rows, of which a batch touches
            few, where no rule says otherwise.
        presets: settings that `ds-ckpt measure` knows by a name: sections by name.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    example: ClassVar[str] = "{}"
    lossless: ClassVar[bool] = False
    least_dims: ClassVar[int] = 1
    sparse: ClassVar[str | None] = None
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def build(self) -> Compressor | None:
        """What these settings do to a tensor; None: it travels uncompressed."""
        assert isinstance(self, Codec), "a method that is no codec builds its compressor"
        return self

    @classmethod
    def looks_at(cls) -> tuple[str, ...]:
        """Every section that it may look at, whatever its settings are."""
        own = (cls.name,) if cls.model_fields else ()
        return (*own, cls.sparse) if cls.sparse else own


AnyMethod = TypeVar("AnyMethod", bound=type[Method])
ENTRY_POINTS = "ds_ckpt.compressors"
TAKEN = frozenset(
    [
        *("none", "auto", "method", "rules", "error_feedback", "exchange", "guard"),
        *("start_step", "warmup_steps", "warmup_bits", "match", "dims", "min_numel", "max_numel"),
    ]
)
"""Names that mean something else in the configuration."""
_registered: dict[str, type[Method]] = {}


def register(method: AnyMethod) -> AnyMethod:
    """Make a method known; also as a decorator. Before `initialize`, in every process.

    Raises:
        ValueError: its name is not free, or a setting has no default or explains nothing.
    """
    name = getattr(method, "name", "")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in TAKEN:
        raise ValueError(f"{method.__name__}: {name!r} cannot be the name of a method")
    known = _registered.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (
        method.__module__,
        method.__qualname__,
    ):
        raise ValueError(f"{name!r} is the name of {known.__module__}.{known.__qualname__} already")
    for key, field in cast("type[Method]", method).model_fields.items():
        if field.is_required():
            raise ValueError(f"{name}.{key} has no default")
        if not field.description or not any(isinstance(m, Expects) for m in field.metadata):
            raise ValueError(
                f"{name}.{key} explains nothing: annotate it with Expects(...) and give its Field "
                "a description"
            )
    if not isinstance(getattr(method, "about", None), str):
        raise ValueError(f"{name} has no `about`, the clause that the schema says of it")
    if issubclass(method, Codec) and (missing := sorted(method.__abstractmethods__)):
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    _registered[name] = method
    return method


def unregister(name: str) -> None:
    """Forget a method, for tests."""
    _registered.pop(name, None)


def methods() -> Mapping[str, type[Method]]:
    """Every method by its name: the built-in ones, then others in the order of registration.

    Raises:
        ValueError: another package's entry point cannot be loaded.
    """
    _load_entry_points()
    return dict(_registered)


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        try:
            found = point.load()
            if isinstance(found, type) and issubclass(found, Method):
                register(found)
        except Exception as error:
            of = point.dist.name if point.dist is not None else "another package"
            raise ValueError(
                f"the compressor {point.name!r} of {of} ({point.value}) cannot be loaded: {error}"
            ) from error


def on_host(device: torch.device) -> bool:
    """Whether an operator has run there when its call returns: then the host waits for nothing, and
    the number of calls matters less than what a cache holds."""
    return device.type == "cpu"


def row_groups(numel: int, limit: int, *of: Tensor) -> Iterator[Sequence[Tensor]]:
    """Tensors of as many rows in groups of rows, which stand for at most `limit` entries of `numel`
    each, at least one row."""
    step = max(1, limit // max(numel, 1))
    return zip(*(t.split(step) for t in of), strict=True) if step < of[0].shape[0] else iter([of])


def add_scaled(into: Tensor, decoded: Tensor, scale: float) -> None:
    """`into += decoded * scale`, in place."""
    into.add_(decoded if scale == 1.0 else decoded * scale)


def add_rows(into: Tensor, decoded: Tensor, scale: float) -> None:
    """`into += row * scale` for each row, in place; on the CPU one after the other."""
    if decoded.shape[0] == 1 or on_host(into.device):
        for row in decoded.unbind():
            add_scaled(into, row, scale)
    else:
        add_scaled(into, decoded.sum(0), scale)
