"""Steps on real tensors, and what the device itself says of them: times, allocator, kernels.

No dispatch mode is on and no hook but one that drops gradients. Policies take turns in timed steps,
so that a busy machine slows all of them alike. Kernels, gaps and bandwidth need CUDA; that part was
written without a GPU at hand, and its arithmetic alone is tested.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_ckpt.profile.measure import Told, checkpointed, gradients_dropped
from ds_ckpt.profile.policies import ComparedPolicy
from ds_ckpt.profile.records import Device, Times
from ds_ckpt.profile.subject import run_forward
from ds_ckpt.telemetry.memory import SavedActivations

_RECOMPUTE = "ds_ckpt recompute"
_COPY_BYTES = 2**28


def times_of(
    model: nn.Module,
    batch: Any,
    policies: Sequence[ComparedPolicy],
    device: torch.device,
    repeats: int,
    told: Told = lambda text: None,
) -> dict[str, Times]:
    """Medians by policy. The first round warms up and does not count.

    Raises ConfigError, UnsupportedError: from putting a policy on the model.
    """
    taken: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for repeat in range(repeats + 1):
        told(f"timed steps, {repeat} of {repeats}" if repeat else "warming up")
        for policy in policies:
            step = _timed_step(model, batch, policy, device)
            if repeat:
                taken[policy.name].append(step)
    name = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = str(torch.cuda.get_device_name(device))
    return {
        policy: Times(name, repeats, *map(statistics.median, zip(*steps, strict=True)))
        for policy, steps in taken.items()
    }


def _timed_step(
    model: nn.Module, batch: Any, policy: ComparedPolicy, device: torch.device
) -> tuple[float, float, float]:
    """Seconds of forward, of backward, and of the recomputes in it."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    recompute_s = 0.0

    @contextmanager
    def recomputing() -> Iterator[None]:
        nonlocal recompute_s
        start_s = now()
        try:
            yield
        finally:
            recompute_s += now() - start_s

    with gradients_dropped(model, batch), checkpointed(model, policy, recomputing):
        start_s = now()
        loss = run_forward(model, batch)
        middle_s = now()
        loss.backward()
        end_s = now()
    return middle_s - start_s, end_s - middle_s, recompute_s


def real_bytes(
    model: nn.Module, batch: Any, policy: ComparedPolicy, device: torch.device
) -> tuple[int, int]:
    """Bytes held after a real forward, and the allocator's peak above what was there before."""
    with gradients_dropped(model, batch), checkpointed(model, policy):
        held = SavedActivations(model)
        with held:
            loss = run_forward(model, batch)
        del loss
        return held.bytes, _allocated(lambda: run_forward(model, batch).backward(), device)


def _allocated(step: Any, device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return highest(nbytes for _, nbytes in changes)


def highest(changes: Iterable[int]) -> int:
    """The most that a running sum of allocations and frees reaches."""
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most


@dataclass(frozen=True)
class KernelSpan:
    """A kernel on the device; seconds."""

    start_s: float
    end_s: float


def watch_device(
    model: nn.Module, batch: Any, policy: ComparedPolicy, moved_bytes: int, device: torch.device
) -> Device:
    """One step under torch's profiler, on a CUDA device.

    Args:
        moved_bytes: what the recompute's operators must read and write.
    """
    from torch.profiler import ProfilerActivity, profile

    bandwidth = copy_bandwidth_bytes_per_s(device)

    @contextmanager
    def named() -> Iterator[None]:
        # the range is closed behind the work: kernels are found by the device's clock
        torch.cuda.synchronize(device)
        with torch.profiler.record_function(_RECOMPUTE):
            yield
            torch.cuda.synchronize(device)

    def step(scope: Any) -> None:
        with gradients_dropped(model, batch), checkpointed(model, policy, scope):
            run_forward(model, batch).backward()
        torch.cuda.synchronize(device)

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    step(None)
    with profile(activities=activities) as plain:  # undisturbed, for the gaps
        step(None)
    with profile(activities=activities) as marked:
        step(named)
    kernels, _ = _spans(plain)
    span_s, gaps_s = gaps(kernels)
    inside, ranges = _spans(marked)
    busy_s = sum(busy(inside, r) for r in ranges)
    return Device(
        copy_bandwidth_bytes_per_s=bandwidth,
        recompute_busy_s=busy_s,
        recompute_moved_bytes=moved_bytes,
        recompute_bandwidth_share=moved_bytes / busy_s / bandwidth if busy_s else 0.0,
        kernels=len(kernels),
        gaps_s=gaps_s,
        span_s=span_s,
    )


def _spans(seen: Any) -> tuple[list[KernelSpan], list[KernelSpan]]:
    """Kernels, and the ranges of recomputes on the host's side of the same clock."""
    cuda = torch._C._autograd.DeviceType.CUDA
    kernels, ranges = [], []
    for event in seen.profiler.kineto_results.events():
        start_s = 1e-9 * event.start_ns()
        span = KernelSpan(start_s, start_s + 1e-9 * event.duration_ns())
        if event.device_type() == cuda:
            if event.name() != _RECOMPUTE:
                kernels.append(span)
        elif event.name() == _RECOMPUTE:
            ranges.append(span)
    return kernels, ranges


def gaps(kernels: Sequence[KernelSpan]) -> tuple[float, float]:
    """Seconds from the first kernel's start to the last one's end, and of them without a kernel."""
    if not kernels:
        return 0.0, 0.0
    ordered = sorted(kernels, key=lambda k: k.start_s)
    idle_s, end_s = 0.0, ordered[0].end_s
    for kernel in ordered[1:]:
        idle_s += max(kernel.start_s - end_s, 0.0)
        end_s = max(end_s, kernel.end_s)
    return end_s - ordered[0].start_s, idle_s


def busy(kernels: Sequence[KernelSpan], within: KernelSpan) -> float:
    """Seconds of a range in which at least one kernel ran."""
    inside = [
        KernelSpan(max(k.start_s, within.start_s), min(k.end_s, within.end_s))
        for k in kernels
        if k.end_s > within.start_s and k.start_s < within.end_s
    ]
    span_s, idle_s = gaps(inside)
    return span_s - idle_s


def copy_bandwidth_bytes_per_s(device: torch.device) -> float:
    """Of the fastest of some large copies: bytes read and written, by the device's own events."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best_s = min(best_s, 1e-3 * start.elapsed_time(end))
    return 2 * _COPY_BYTES / best_s
