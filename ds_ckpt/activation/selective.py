"""Selective recomputation: results of chosen operators are kept and not computed again.

`Recording` acts around the forward, `Replaying` around the recomputation. Torch's own pair keeps
results where no saved-tensor hook sees them (offload), and refuses results that are written over.
It allows one backward, and leaves the random state before an attention core with dropout.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ds_ckpt.activation.blocks import attention_parts, gates, mlp_parts
from ds_ckpt.errors import ConfigError, Problem, log
from ds_ckpt.patch import Patches
from ds_ckpt.telemetry.memory import storage_key, unpack_unchanged

_CORES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm")
SETS = ("matmuls", "attention", "qkvo", "gate")
"""All products and attention cores; cores; products inside attention; first product of MLPs."""


@functools.cache
def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    packets = [p for name in names if (p := getattr(torch.ops.aten, name, None)) is not None]
    found = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}
    return frozenset(o for o in found if not o._schema.is_mutable)


def products() -> frozenset[Any]:
    """Return matrix products and convolutions."""
    return _overloads(_PRODUCTS)


def cores() -> frozenset[Any]:
    """Return attention cores."""
    return _overloads(_CORES)


def _named(name: str, where: str) -> frozenset[Any]:
    """Return the overloads of `aten.mm`, `aten.mm.default` or an operator of another library."""
    space, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), packet_name, None) if packet_name else None
    known = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    operators = {getattr(packet, o) for o in known if overload in ("", o)}
    pure = frozenset(o for o in operators if not o._schema.is_mutable)
    if not pure:
        why = "its result cannot be kept" if operators else "torch knows no such operator or set"
        remedy = f'write sets ({", ".join(SETS)}), joined by "+", or operators such as "aten.mm"'
        raise ConfigError(Problem(where, f'"{name}"', why, remedy))
    return pure


def unknown_operators(save_ops: Iterable[str], where: str) -> Iterator[Problem]:
    """Yield the words that no set and no operator has; other libraries' may be loaded later."""
    for word in (part for entry in save_ops for part in entry.split("+")):
        if word not in SETS and word.rpartition(".")[0].partition(".")[0] in ("", "aten"):
            try:
                _named(word, where)
            except ConfigError as error:
                yield from error.problems


class Choice:
    """Saved operators of one block. Sets that depend on the module mark it while it runs.

    `save_ops` are sets joined by "+", or operators; `where` is their JSON path. Unknown names, and
    sets without such a part in the block, raise ConfigError. `patches` records the marks.
    """

    def __init__(
        self, save_ops: Sequence[str], where: str, name: str, block: nn.Module, patches: Patches
    ) -> None:
        # a dispatch mode's first use imports it, and would keep that forward's frames alive
        importlib.import_module("torch._dynamo")
        self._inside = 0
        """Number of marked modules that are running."""
        self._products = products()  # looked up here and not in the middle of a forward
        anywhere: set[Any] = set()
        for word in (part for entry in save_ops for part in entry.split("+")):
            if word == "matmuls":
                anywhere |= products() | cores()
            elif word == "attention":
                anywhere |= cores()
            elif word not in ("qkvo", "gate"):
                anywhere |= _named(word, where)
            else:
                parts = [module for _, module in attention_parts(name, block)]
                parts = gates(mlp_parts(name, block)) if word == "gate" else parts
                if not parts:
                    rule = f'"rules": [{{"match": "{name}", "policy": "block"}}]'
                    why = f"{name} has no part that looks like it"
                    remedy = f'use "matmuls" or operators, or write for blocks without it {rule}'
                    raise ConfigError(Problem(where, f'"{word}"', why, remedy))
                for part in parts:
                    patches.set_method(part, "forward", self._marked(part.forward))
        self._anywhere = frozenset(anywhere)

    def _marked(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def marked_forward(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside -= 1

        return marked_forward

    def wants(self, operator: Any) -> bool:
        """Return whether the result of this operator, running now, is saved."""
        return operator in self._anywhere or (self._inside > 0 and operator in self._products)


# random states, and tensors that are kept


Tracker = Any
"""Random states of Megatron or DeepSpeed for tensor parallelism: `get_states`, `set_states`."""


class RandomState:
    """States of the CPU's generator, of those of the tensors' accelerators, and of trackers."""

    def __init__(self, tensors: Sequence[Tensor], trackers: Sequence[Tracker]) -> None:
        self._cpu = torch.get_rng_state()
        devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        self._devices = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]
        self._trackers = [(t, dict(t.get_states())) for t in trackers]

    def restore(self) -> None:
        """Restore every state."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)
        for tracker, states in self._trackers:
            tracker.set_states(dict(states))


class SavedTensors:
    """Tensors kept for a recomputation, packed by the innermost saved-tensor hooks as by autograd.

    A tensor that is changed in place afterwards makes `get` raise, unless a hook has copied it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, self._unpack = hooks or (lambda t: (t, t._version), unpack_unchanged)
        self._kept = [(pack(t.detach()), t.requires_grad) for t in tensors]

    def get(self) -> list[Tensor]:
        """Return the tensors as leaves, with the `requires_grad` of the kept ones."""
        return [self._unpack(t).detach().requires_grad_(needs) for t, needs in self._kept]


# around the forward, around the recomputation


@dataclass
class _Entry:
    operator: Any
    results: list[Any]
    spec: TreeSpec
    packs: int
    versions: list[int]
    after: RandomState | None
    first: int = -1
    """Index of its first kept tensor; -1: it is computed again."""


@functools.cache
def is_view(operator: Any) -> bool:
    """Return whether a result shares memory with an argument."""
    return any(r.alias_info is not None for r in operator._schema.returns)


@functools.cache
def writes_to(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of every argument that the operator writes to.

    Collectives do not declare it. (AutoTP sums over the group in the memory of a product.)
    """
    collective = operator.namespace == "c10d"
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if collective or (argument.alias_info is not None and argument.alias_info.is_write)
    )


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would switch its compiler, which is off, around every operator


@functools.cache
def _warn_nothing_kept() -> None:
    log.warning(
        "ds_ckpt: no operator of save_ops ran in a block, and nothing of it is kept "
        '("attention" needs attn_implementation="sdpa"; eager attention is "matmuls")'
    )


class Recording(_Mode):
    """Mode around a forward that records the results to save.

    `packs` returns the number of tensors that autograd has saved so far.
    """

    def __init__(
        self, choice: Choice, packs: Callable[[], int], trackers: Sequence[Tracker] = ()
    ) -> None:
        super().__init__()
        self._choice, self._packs, self._trackers = choice, packs, trackers
        self.entries: list[_Entry] = []
        self._writes: dict[int | None, int] = {}
        """Storage: how many entries there were when it was last written."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, name in writes_to(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self._writes[storage_key(tensor)] = len(self.entries)
        out = func(*args, **kwargs)
        if self._choice.wants(func):
            results, spec = tree_flatten(out)
            tensors = [r for r in results if isinstance(r, Tensor)]
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            after = RandomState(tensors, self._trackers) if is_random else None
            versions = [t._version for t in tensors]
            self.entries.append(_Entry(func, results, spec, self._packs(), versions, after))
        return out

    def finish(self, outside: Iterable[Tensor], *, whole: bool) -> list[Tensor]:
        """Return the tensors to keep, in order; afterwards the entries hold none.

        Results in memory that other code can reach (`outside`) are not kept, because it may write
        to them. Nor are results that something has written over. Unless the recomputation runs to
        its end (`whole`), results after the last tensor that autograd saves are not kept either.
        Versions are not enough: `_unsafe_view` (every 3-D product) and `.data` share the storage
        and count versions of their own.
        """
        if not self.entries:
            _warn_nothing_kept()
        kept: list[Tensor] = []
        reachable = {storage_key(t) for t in outside}
        for index, entry in enumerate(self.entries):
            tensors = [r for r in entry.results if isinstance(r, Tensor)]
            storages = [storage_key(t) for t in tensors]
            if (
                (whole or entry.packs < self._packs())
                and reachable.isdisjoint(storages)
                and entry.versions == [t._version for t in tensors]
                and all(self._writes.get(storage, 0) <= index for storage in storages)
            ):
                entry.first = len(kept)
                kept += [t.detach() for t in tensors]
            entry.results = [_TENSOR if isinstance(r, Tensor) else r for r in entry.results]
        return kept


_TENSOR = object()


class Replaying(_Mode):
    """Mode around a recomputation that returns the `kept` results, in the forward's order.

    `differs` raises the error that names the block.
    """

    def __init__(
        self,
        choice: Choice,
        entries: Sequence[_Entry],
        kept: Sequence[Tensor],
        differs: Callable[[str], NoReturn],
    ) -> None:
        super().__init__()
        self._choice, self._entries, self._kept = choice, iter(entries), kept
        self._differs = differs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._choice.wants(func):
            return func(*args, **(kwargs or {}))
        entry = next(self._entries, None)
        if entry is None or entry.operator is not func:
            before = entry.operator if entry else "no more of the kept operators"
            self._differs(f"{func} runs, in the forward ran {before}")
        if entry.first < 0:
            return func(*args, **(kwargs or {}))
        position = iter(range(entry.first, len(self._kept)))
        results = [
            self._kept[next(position)].detach() if r is _TENSOR else r for r in entry.results
        ]
        if entry.after is not None:
            entry.after.restore()
        return tree_unflatten(results, entry.spec)
