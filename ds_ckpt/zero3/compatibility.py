"""Symbols of DeepSpeed that the hooks use, and their state in the installed version.

Each symbol is checked by name, by signature and by a digest of its source (without comments and
blank lines). A missing symbol or another signature refuses the plugin. Another digest logs a
warning, and the first bucket of the running engine is compared with DeepSpeed's own reduction.

All differences between supported versions are here or marked with a version where they are used.
"""

import functools
import hashlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from pydantic import TypeAdapter

from ds_ckpt.errors import ContractError, Problem, UnsupportedError
from ds_ckpt.patch import Patches

FIRST, LAST = "0.18.5", "0.19.8"
"""Supported versions of DeepSpeed; docs/support.md has what was run with them."""
TRIED = {
    "python": ("3.10", "3.13"),
    "torch": ("2.9", "2.15"),
    "deepspeed": (FIRST, LAST),
    "transformers": ("4.57", "5.24"),
}
"""First and last version with which scripts/matrix.sh passed; pyproject.toml requires the same."""
RESIDENT_SINCE = "0.19.5"
"""Earlier, hpZ leaves padding uninitialized, and fails if a rank's part is only padding."""

Reduce = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""From a bucket's full gradients to this rank's chunks."""
SkipDecision = Callable[[], Any]


@dataclass(frozen=True)
class Symbol:
    """A function or object of DeepSpeed that a hook uses.

    Attributes:
        path: `module:qualified.name`.
        signature: Its parameters, or the type of an object.
        digests: Its source in supported versions.
        since, until: First and last version that has it; "" for no bound.
    """

    path: str
    signature: str
    digests: tuple[str, ...]
    why: str
    since: str = ""
    until: str = ""

    def expected_in(self, version: str) -> bool:
        """Return whether that version of DeepSpeed has it."""
        number = _release(version)
        after = not self.since or number >= _release(self.since)
        return after and (not self.until or number <= _release(self.until))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@dataclass(frozen=True)
class SymbolFinding:
    """State of one symbol in the installed DeepSpeed."""

    symbol: str
    status: Literal["ok", "digest_changed", "broken"]
    detail: str
    remedy: str


SYMBOLS = TypeAdapter(tuple[Symbol, ...]).validate_json(
    Path(__file__).with_name("symbols.json").read_bytes()
)
"""All symbols that the hooks use; digests are the newest first."""


def _parameters(function: Any) -> str:
    """Return parameter names and marks of defaults; annotations may differ."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        kind = parameter.kind
        star = "*" * (1 if kind == kind.VAR_POSITIONAL else 2 if kind == kind.VAR_KEYWORD else 0)
        default = "=" if parameter.default is not parameter.empty else ""
        parts.append(f"{star}{parameter.name}{default}")
    return ", ".join(parts)


def _undecorated(function: Any) -> Any:
    """Return the function without decorators, also `instrument_w_nvtx`, which is a closure."""
    while True:
        function = inspect.unwrap(function)
        inside = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
        inside = [f for f in inside if inspect.isfunction(f)]
        if len(inside) != 1:
            return function
        function = inside[0]


def identify(target: Any) -> tuple[str, str]:
    """Return signature and source digest of a function, or the type's name of an object."""
    if not callable(target):
        return type(target).__name__, ""
    target = _undecorated(target)
    return _parameters(target), _source_digest(target)


@functools.cache  # reading all sources takes half as long as starting a small engine
def _source_digest(function: Any) -> str:
    source = textwrap.dedent(inspect.getsource(function))
    lines = [line.strip() for line in source.splitlines()]
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _check_one(symbol: Symbol, installed: str) -> SymbolFinding:
    tested = f"{FIRST} to {LAST}"
    install = f"install a tested version: pip install 'deepspeed>={FIRST},<={LAST}'"
    try:
        target = pkgutil.resolve_name(symbol.path)
        signature, digest = identify(target)
    except (ImportError, AttributeError, OSError, TypeError) as error:
        detail = f"missing in DeepSpeed {installed} ({error}); tested with {tested}"
        return SymbolFinding(symbol.path, "broken", f"{detail}; used to {symbol.why}", install)
    if signature != symbol.signature:
        detail = f"takes ({signature}), expected ({symbol.signature}); used to {symbol.why}"
        return SymbolFinding(symbol.path, "broken", detail, install)
    if digest not in (symbol.digests or [""]):
        detail = f"source changed in DeepSpeed {installed} (tested with {tested})"
        remedy = "with a compression method the first bucket is checked both ways; else " + install
        return SymbolFinding(symbol.path, "digest_changed", detail, remedy)
    return SymbolFinding(symbol.path, "ok", symbol.why, "")


def check(symbols: Iterable[Symbol] | None = None) -> list[SymbolFinding]:
    """Return one finding per symbol. Does not raise for another DeepSpeed."""
    import deepspeed

    installed = deepspeed.__version__
    asked = SYMBOLS if symbols is None else symbols
    return [_check_one(s, installed) for s in asked if s.expected_in(installed)]


def require(symbols: Iterable[Symbol] | None = None) -> list[SymbolFinding]:
    """Raise `ContractError` with every broken symbol; return those with another digest."""
    findings = check(symbols)
    broken = [f for f in findings if f.status == "broken"]
    if broken:
        why = "the plugin patches this symbol, and its assumptions would be wrong"
        raise ContractError([Problem(f.symbol, f.detail, why, f.remedy) for f in broken])
    return [f for f in findings if f.status == "digest_changed"]


def outside(package: str, version: str) -> str:
    """Return the range of versions that were tested, "" if that version is inside."""
    first, last = TRIED.get(package, ("", ""))
    number, end = _release(version), _release(last)
    if not first or (_release(first) <= number and number[: len(end)] <= end):
        return ""
    return f"{first} to {last}"


def require_torch(version: str = torch.__version__) -> None:
    """Raise `UnsupportedError` for a PyTorch without what recomputation and factors need."""
    first, last = TRIED["torch"]
    if _release(version) < _release(first):
        why = "2.7 has no hooks on saved tensors, and 2.8 no matmul precision"
        remedy = f"install a newer one, tried up to {last}: pip install 'torch>={first}'"
        raise UnsupportedError(Problem("torch", version, why, remedy))


def require_resident_weights(version: str) -> None:
    """Raise `UnsupportedError` for a DeepSpeed without usable secondary partitions."""
    if _release(version) < _release(RESIDENT_SINCE):
        where, found = "$.ds_ckpt.weights.resident", f"true with DeepSpeed {version}"
        why = "its secondary partition (hpZ) leaves padding uninitialized, or fails on it"
        install = f"pip install 'deepspeed>={RESIDENT_SINCE},<={LAST}'"
        remedy = f"write false, or install a later DeepSpeed: {install}"
        raise UnsupportedError(Problem(where, found, why, remedy))


def wrap_skip_decision(
    optimizer: Any, patches: Patches, around: Callable[[SkipDecision], Any], *, always_check: bool
) -> None:
    """Replace the method that decides whether a step is skipped by `around` that method.

    Before 0.19.8 it checks for overflow first, and for fp16 alone. Like 0.19.8, `always_check`
    skips steps with non-finite gradients in every dtype. That version's norm leaves replicated
    parameters out on all tensor-parallel ranks but the first; `always_check` looks there, too.
    """
    names = "_loss_scale_update_and_overflow_cleanup", "_overflow_check_and_loss_scale_update"
    name = next(name for name in names if hasattr(optimizer, name))
    decide = getattr(optimizer, name)
    checks = always_check and optimizer.dtype != torch.float16

    def check_and_decide() -> Any:
        if checks and name == names[0] and optimizer.model_parallel_group is not None:
            optimizer.overflow = bool(optimizer.has_overflow() or optimizer.overflow)
        if checks and name == names[1]:
            optimizer.check_overflow()
            scaler = optimizer.torch_autocast_gradscaler
            if optimizer.overflow and scaler is not None:  # not updated in a skipped step
                scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        return around(decide)

    if name == names[1]:  # DeepSpeed resets it for fp16 alone, and would skip on after detach
        patches.set(optimizer, "overflow", optimizer.overflow)
    patches.set(optimizer, name, check_and_decide)


def ends_step(optimizer: Any) -> bool:
    """Return whether this micro-step ends a step. A method since 0.19.5, an attribute before."""
    answer = optimizer.is_gradient_accumulation_boundary
    return bool(answer() if callable(answer) else answer)


def shard_group(optimizer: Any, param: Any) -> Any:
    """Return the process group that shards a parameter and reduces its gradient."""
    find = getattr(optimizer, "_get_param_partition_group", None)  # since 0.19.3
    return optimizer.dp_process_group if find is None else find(param)


def same_ranks(group: Any, other: Any) -> bool:
    """Return whether two process groups have the same ranks in the same order."""
    ranks = torch_dist.get_process_group_ranks
    return group is other or ranks(group) == ranks(other)


def use_shard_group(engine: Any, patches: Patches) -> None:
    """Make the group that shards all trained parameters the optimizer's own.

    With a device mesh, DeepSpeed's is that of the data-parallel ranks. They would decide without
    the sequence-parallel ones whether a step is skipped, and write each other's checkpoint files.
    """
    optimizer = engine.optimizer
    first, *others = (shard_group(optimizer, p) for group in optimizer.fp16_groups for p in group)
    own = optimizer.dp_process_group
    if not same_ranks(first, own) and all(same_ranks(first, other) for other in others):
        patches.set(optimizer, "dp_process_group", first)
        patches.set(engine, "seq_dp_world_size", torch_dist.get_world_size(first))


def check_identity(
    names: Sequence[str], tensors: list[torch.Tensor], ours: Reduce, theirs: Reduce, group: Any
) -> bool:
    """Reduce copies of a bucket's full gradients both ways, and compare. Collective.

    Returns False if a gradient was not finite, and nothing was compared. Raises ContractError on
    every rank, with the parameters' names, if the results differ on one.
    """
    expected = theirs([t.clone() for t in tensors])
    got = ours([t.clone() for t in tensors])
    nonfinite = not all(bool(t.isfinite().all()) for t in (*expected, *got))
    pairs = zip(names, expected, got, strict=True)
    differing = [] if nonfinite else [name for name, a, b in pairs if not _same(a, b)]
    # agreed across ranks: none may continue into a collective after another has raised
    flags = tensors[0].new_tensor([len(differing), int(nonfinite)], dtype=torch.int64)
    torch_dist.all_reduce(flags, group=group)
    different, unknown = flags.tolist()
    if unknown or not different:
        return not unknown
    where = f"reduce_scatter_coalesced, parameter {', '.join(differing) or '(on other ranks)'}"
    found = "another result than an exchange that sends everything"
    why = "the hook replaces its reduction, which computes something else"
    remedy = "install a DeepSpeed that ds-ckpt doctor reports as tested"
    raise ContractError(Problem(where, found, why, remedy))


def _same(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Return whether finite tensors are equal within the rounding of a sum."""
    tolerance = 8 * torch.finfo(expected.dtype).eps
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    same_shape = expected.shape == got.shape
    return same_shape and torch.allclose(expected, got, rtol=tolerance, atol=tolerance * largest)


def rng_trackers() -> list[Any]:
    """Return the random states of tensor-parallel code: DeepSpeed's and Megatron's."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    trackers = [get_cuda_rng_tracker()]
    megatron = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron is not None:
        trackers.append(megatron.get_cuda_rng_tracker())
    return trackers


def parse_hjson(text: str) -> dict[str, Any]:
    """Parse a configuration as DeepSpeed does. Raises ValueError."""
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    return dict(hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys))
