"""A pretended accelerator, for machines without one: streams, host waits and races are checked.

    with Gpu().watched() as gpu:
        x = gpu.tensor(torch.ones(4))      # says that it is on `DEVICE`, computes on the CPU
        ...
    assert not gpu.findings and not gpu.waits

Every operator on a tensor of `DEVICE` is a kernel of the current stream. Kernels run when they are
called, so results are right whatever the order; what is checked is whether the order was promised.
Each stream, and the host, has a vector clock: `seen[a][b]` is the last kernel of b that is known to
have ended before whatever a does next. A kernel that touches memory which another stream has
touched, one of them writing, must have seen that (Lamport 1978; torch's own sanitizer for CUDA
does the same on a real device). Memory that is freed goes back to the stream that it was allocated
on, as in torch's caching allocator; what others did with it must have been seen there, or told to
the allocator by `record_stream`.

A host wait is what blocks the host on a real device: a value that is read back (`item`, a shape
that depends on values), a copy between host and device that is not `non_blocking`.

`Gpu(plain=True)` takes every plain CPU tensor for one of the device, but for those that are made
inside `host_memory()`: for code that asks tensors for their addresses. Collectives count as kernels
that have ended when they return.

Under `torch.use_deterministic_algorithms(True)` operators raise that CUDA refuses then, according
to its documentation.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
"""A device type of every build of torch, which needs no initialisation."""
HOST = "host"
_READ_BACK = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
_OURS = ("/ds_ckpt/", "/deepspeed/")
_NEVER_DETERMINISTIC = {"histc", "kthvalue", "median", "put_"}


class OnDevice(Tensor):
    """Says that it is on the device; `inner` has the values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        form = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, **form, dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of `watched`")

    def record_stream(self, stream: Any) -> None:
        stream.gpu.keep_for(self.inner, stream)


@dataclass
class _Access:
    stream: Any
    number: int
    what: str


@dataclass
class _Memory:
    """One storage: where it is, whose allocator has it, and who touched it since its last write."""

    home: Any
    on_host: bool
    written: _Access | None = None
    read: list[_Access] = field(default_factory=list)
    recorded: set[Any] = field(default_factory=set)


class Stream:
    """Like `torch.cuda.Stream`."""

    device = DEVICE

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self._name = gpu, name

    def __repr__(self) -> str:
        return self._name

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.host_waits(self, "synchronize")

    def query(self) -> bool:
        return False


class Event:
    """Like `torch.cuda.Event`; it has ended once the host has waited for it, and not before."""

    def __init__(self, gpu: Gpu, enable_timing: bool = False, **_: Any) -> None:
        self._gpu, self._timed = gpu, enable_timing
        self._seen: dict[Any, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self._seen = dict(self._gpu.seen[stream or self._gpu.current_stream()])

    def wait(self, stream: Stream | None = None) -> None:
        self._gpu.sees(stream or self._gpu.current_stream(), self._seen)

    def synchronize(self) -> None:
        self._gpu.waits[f"{_where()} event"] += 1
        self._gpu.sees(HOST, self._seen)

    def query(self) -> bool:
        host = self._gpu.seen[HOST]
        return all(host.get(stream, 0) >= number for stream, number in self._seen.items())

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            assert event._timed, "an event without enable_timing"
            assert event.query(), "an event that has not ended"
        return 1.0


class Gpu:
    """One device, and what `torch.get_device_module` gives for it.

    Attributes:
        findings: races, in words.
        waits: host waits by place and operator.
        launches: kernels by operator.
        moved: bytes that kernels read and write, by stream; in place they are counted once.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self._plain, self.counts = plain, True
        self._lock = threading.RLock()
        self._local = threading.local()
        self._memory: dict[int, _Memory] = {}
        self._numbers: Counter[Any] = Counter()
        self.seen: defaultdict[Any, dict[Any, int]] = defaultdict(dict)
        self._default = Stream(self, "default")
        self.findings: list[str] = []
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.moved: Counter[Any] = Counter()

    # -- what a device module has ------------------------------------------------------------------

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: N802 - torch's name
        return Stream(self, f"side {next(self._names)}")

    def Event(self, **options: Any) -> Event:  # noqa: N802 - torch's name
        return Event(self, **options)

    def current_stream(self, device: Any = None) -> Stream:
        stream: Stream = getattr(self._local, "stream", self._default)
        return stream

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream or self.current_stream()
        try:
            yield
        finally:
            self._local.stream = before

    def synchronize(self, device: Any = None) -> None:
        self.waits[f"{_where()} synchronize"] += 1
        for stream in list(self.seen):
            self.sees(HOST, self.seen[stream])

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        """Random numbers are the host's."""

    _names = iter(range(1, 1 << 30))

    # -- for tests ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[Gpu]:
        """Watch the thread that enters; `torch.get_device_module` gives this device everywhere."""
        given, recorded = torch.get_device_module, torch.Tensor.record_stream

        def module(device: Any = None) -> Any:
            kind = torch.device(device).type if device is not None else "cpu"
            return self if self._plain or kind == DEVICE.type else given(device)

        def record(tensor: Tensor, stream: Stream) -> None:
            self.keep_for(tensor, stream)

        torch.get_device_module = module  # type: ignore[assignment]
        torch.Tensor.record_stream = record  # type: ignore[assignment,method-assign]
        try:
            with self.seeing():
                yield self
        finally:
            torch.get_device_module = given
            torch.Tensor.record_stream = recorded  # type: ignore[method-assign]

    def seeing(self) -> TorchDispatchMode:
        """Watch a further thread."""
        return _Watch(self)

    @staticmethod
    def tensor(values: Tensor) -> Tensor:
        return OnDevice(values)

    @contextlib.contextmanager
    def host_memory(self) -> Iterator[None]:
        """Allocate in host memory inside, on a `plain` device."""
        before, self._local.host = getattr(self._local, "host", False), True
        try:
            yield
        finally:
            self._local.host = before

    def uncounted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A collective that computes in Python what a network does."""

        def quiet(*args: Any, **kwargs: Any) -> Any:
            before, self.counts = self.counts, False
            try:
                return call(*args, **kwargs)
            finally:
                self.counts = before

        return quiet

    def forget(self) -> None:
        self.findings.clear()
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        for counted in (self.waits, self.launches, self.moved):
            counted.clear()

    # -- clocks ------------------------------------------------------------------------------------

    def sees(self, who: Any, what: dict[Any, int]) -> None:
        with self._lock:
            clock = self.seen[who]
            for stream, number in what.items():
                clock[stream] = max(clock.get(stream, 0), number)

    def host_waits(self, stream: Any, what: str) -> None:
        self.waits[f"{_where()} {what}"] += 1
        self.sees(HOST, self.seen[stream])

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        self._of(_inner(tensor)).recorded.add(stream)

    def _of(self, tensor: Tensor, *, on_host: bool = False) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = _Memory(self.current_stream(), on_host)
            weakref.finalize(storage, self._freed, key, memory).atexit = False
        return memory

    def _freed(self, key: int, memory: _Memory) -> None:
        with self._lock:
            if self._memory.get(key) is memory:
                del self._memory[key]
            if memory.on_host:  # pinned blocks: torch's allocator records what copies from them
                return
            # whatever is launched from here on comes behind what the host has waited for
            clock, host = self.seen[memory.home], self.seen[HOST]
            for access in [*memory.read, *([memory.written] if memory.written else [])]:
                if access.stream in (memory.home, HOST) or access.stream in memory.recorded:
                    continue
                if max(clock.get(access.stream, 0), host.get(access.stream, 0)) < access.number:
                    self.findings.append(
                        f"freed to {memory.home} while {access.what} on {access.stream} may go on"
                    )

    def kernel(self, name: str, reads: list[Tensor], writes: list[Tensor], *, host: bool) -> None:
        """One operator of the host or of the current stream."""
        with self._lock:
            who: Any = HOST if host else self.current_stream()
            if not host:
                self.sees(who, self.seen[HOST])  # launched behind what the host did
                self.launches[name] += 1
                self.moved[who] += sum(t.nbytes for t in (*reads, *writes))
            self._numbers[who] += 1
            number = self._numbers[who]
            self.seen[who][who] = number
            written = {t.untyped_storage()._cdata for t in writes}
            for tensor in [*reads, *writes]:
                memory = self._of(tensor)
                write = tensor.untyped_storage()._cdata in written
                before = [memory.written] if memory.written else []
                for access in [*before, *memory.read] if write else before:
                    if self.seen[who].get(access.stream, 0) < access.number:
                        verb = "writes" if write else "reads"
                        self.findings.append(
                            f"{name} on {who} {verb} what {access.what} on {access.stream} may "
                            f"still be at, from {_where()}"
                        )
                access = _Access(who, number, name)
                if write:
                    memory.written, memory.read = access, []
                else:
                    memory.read.append(access)


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, OnDevice) else tensor


def _where() -> str:
    for frame in reversed(traceback.extract_stack(limit=40)):
        for package in _OURS:
            if package in frame.filename and "/tests/" not in frame.filename:
                return f"{package[1:]}{frame.filename.split(package)[-1]}:{frame.lineno}"
    return "elsewhere"


class _Watch(TorchDispatchMode):
    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, dict(kwargs or {})
        name = func._schema.name.split("::")[-1]
        given = [t for t in tree_leaves((args, kwargs)) if _strided(t)]
        known = {id(_inner(t)): t for t in given}
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == DEVICE.type:
            kwargs["device"] = torch.device("cpu")
        plain_args, plain_kwargs = tree_map(_unwrapped, (args, kwargs))
        homes = [self._on_host(t) for t in given]
        if not all(homes) and torch.are_deterministic_algorithms_enabled():
            assert _has_deterministic_form(name, args), f"{name} has no deterministic form on CUDA"
        if asked is None:
            to_host = all(homes) if given else self._makes_host()
        else:
            to_host = torch.device(asked).type == "cpu" and (not gpu._plain or self._makes_host())
            if gpu._plain and given and not self._makes_host():
                to_host = all(homes)
        between = name in ("copy_", "_to_copy") and len({*homes, to_host}) > 1
        if not between and len(set(homes)) > 1:
            mixed = [t for t, host in zip(given, homes, strict=True) if host and t.dim()]
            assert not mixed, f"{name} of tensors on both devices"
        result = func(*plain_args, **plain_kwargs)
        on_host = to_host if name != "copy_" else homes[0]
        out = tree_map(lambda t: self._wrapped(t, known, on_host), result)
        if not gpu.counts:
            return out
        self._note(func, name, args, kwargs, result, given, homes, between=between)
        waits = name in _READ_BACK or (name == "index" and _masks(args))
        if between:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
        if waits and not (given and all(homes) and not between):
            gpu.host_waits(gpu.current_stream(), name)
        return out

    def _makes_host(self) -> bool:
        return not self._gpu._plain or getattr(self._gpu._local, "host", False)

    def _on_host(self, tensor: Tensor) -> bool:
        if not self._gpu._plain:
            return not isinstance(tensor, OnDevice)
        return self._gpu._of(tensor).on_host

    def _wrapped(self, tensor: Any, known: dict[int, Tensor], on_host: bool) -> Any:
        if not _strided(tensor):
            return tensor
        if id(tensor) in known:
            return known[id(tensor)]
        if self._gpu.counts:
            self._gpu._of(tensor, on_host=on_host)
        return tensor if on_host or self._gpu._plain else OnDevice(tensor)

    def _note(self, func, name, args, kwargs, result, given, homes, *, between) -> None:
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        values = [*args, *kwargs.values()]
        names = [a.name for a in func._schema.arguments[: len(args)]] + list(kwargs)
        of = {a.name: a for a in func._schema.arguments}
        for key, value in zip(names, values, strict=True):
            alias = of[key].alias_info
            tensors = [_inner(t) for t in tree_leaves(value) if _strided(t) and t.numel()]
            if func.namespace == "c10d" or (alias is not None and alias.is_write):
                writes += tensors
            elif alias is None:
                reads += tensors
        if name.startswith(("empty", "new_empty", "set_", "is_pinned")):
            return
        old = {_inner(t).untyped_storage()._cdata for t in given}
        for value in tree_leaves(result):
            if _strided(value) and value.numel() and value.untyped_storage()._cdata not in old:
                writes.append(value)
        made = [t for t in tree_leaves(result) if _strided(t)]
        if not (reads or writes):
            return
        if not writes and made and all(t.untyped_storage()._cdata in old for t in made):
            return  # a view
        host = all(homes) if given else all(self._gpu._of(t).on_host for t in made)
        self._gpu.kernel(name, reads, writes, host=host and not between)


def _strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _unwrapped(value: Any) -> Any:
    return _inner(value) if isinstance(value, Tensor) else value


def _has_deterministic_form(name: str, args: Any) -> bool:
    if name == "bincount":
        return len(args) < 2 or args[1] is None
    if name.startswith("cumsum"):
        return not args[0].is_floating_point()
    return name not in _NEVER_DETERMINISTIC


def _masks(args: Any) -> bool:
    return any(isinstance(t, Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1:]))


def in_threads(gpu: Gpu, work: Callable[[int], Any]) -> Callable[[int], Any]:
    """`work` for threads that are to be watched, too."""

    def watched(number: int) -> Any:
        with gpu.seeing():
            return work(number)

    return watched
