"""Run in the worker processes: exchanges beside backward."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload

import ds_ckpt
from ds_ckpt.telemetry import Purpose
from ds_ckpt.zero3 import gradient, overlap
from tests.distributed import models
from tests.distributed.pool import fresh, once

WAIT_S = 20.0


def _engine(kind: str, section: dict[str, Any], overlaps: bool, **options: Any) -> Any:
    compression = dict(section["compression"])
    compression["exchange"] = {**compression.get("exchange", {}), "overlap": overlaps}
    section = {**section, "compression": compression}
    return models.start(kind, models.zero3_config(ds_ckpt=section, **options))


def threads() -> list[str]:
    """The exchange's threads that run in this process."""
    return [t.name for t in threading.enumerate() if t.name.startswith("exchange of")]


def _wrap_reduce(engine: Any, before: Callable[[int], None]) -> None:
    """Call `before(number of the bucket)` at the start of every exchange, in its thread.

    The wrapper holds no exchange: its process group ends with it, without a garbage collector.
    """
    exchange = ds_ckpt.session_of(engine).exchange.exchange  # type: ignore[union-attr]
    reduce, itself, count = type(exchange).reduce, weakref.ref(exchange), iter(range(10**9))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(next(count))
        return reduce(itself(), *args, **kwargs)

    exchange.reduce = wrapped


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    session = ds_ckpt.session_of(engine)
    return {
        "losses": losses,
        "weights": models.weights_digest(engine),
        "residuals": _digest(session.residuals),
        "norm": float(engine.get_global_grad_norm()),
        "sent": dict(session.counters.bytes_sent),
        "collectives": dict(session.counters.collectives),
    }


def same_either_way(
    kind: str, section: dict[str, Any], steps: int, naps_s: tuple[float, ...], **options: Any
) -> dict[str, Any]:
    """Outcomes with overlap off and on; on, the exchange of bucket i starts `naps_s[i]` late."""
    outcomes: dict[str, Any] = {}
    for name, overlaps in (("off", False), ("on", True)):
        fresh()
        engine = _engine(kind, section, overlaps, **options)
        buckets: list[tuple[int, str]] = []

        def late(i: int, seen: list[tuple[int, str]] = buckets) -> None:
            seen.append((i, threading.current_thread().name))
            if threading.current_thread() is not threading.main_thread() and naps_s:
                time.sleep(naps_s[i % len(naps_s)])

        _wrap_reduce(engine, late)
        losses = models.train(engine, kind, steps)
        outcomes[name] = _outcome(engine, losses)
        outcomes[f"{name} threads"] = {thread for _, thread in buckets}
        outcomes[f"{name} buckets"] = len(buckets)
        counters = ds_ckpt.session_of(engine).counters  # type: ignore[union-attr]
        outcomes[f"{name} seconds"] = (counters.reduce_s, counters.exposed_reduce_s)
        engine.destroy()
        outcomes[f"{name} left"] = threads()
    return outcomes


def odd_loops(section: dict[str, Any]) -> dict[str, Any]:
    """Torch's own backward, several backward calls a step, evaluation in between, no_sync."""
    outcomes = {}
    for name, overlaps in (("off", False), ("on", True)):
        fresh()
        engine = _engine("llama", section, overlaps)
        losses = []
        for step in range(4):
            for part in range(3):
                data = models.batch("llama", 3 * step + part, dist.get_rank())
                loss = engine(**data).loss
                if part == 1:
                    loss.backward()
                else:
                    engine.backward(loss)
                losses.append(float(loss))
                engine.eval()
                with torch.no_grad():
                    losses.append(float(engine(**data).loss))
                engine.train()
            engine.step()
        try:
            with engine.no_sync():
                refused = False
        except AssertionError:
            refused = True
        outcomes[name] = _outcome(engine, losses)
        outcomes[f"{name} refused"] = refused
        engine.destroy()
    return outcomes


def goes_on(section: dict[str, Any]) -> dict[str, Any]:
    """The first bucket's exchange waits until backward has gathered weights after handing it over.

    Backward that stood still, or a gather behind the exchange, would never get there. Time passes
    in that exchange alone, before backward goes on: a second that no one waits for.
    """
    fresh()
    engine = _engine("llama", section, True, reuse=0)
    session = ds_ckpt.session_of(engine)
    assert session is not None
    counters, gathered, told = session.counters, threading.Event(), {}
    in_flight, peak = [0], [0]
    before_norm = []
    now_s, begun = [0.0], threading.Event()

    def wait_for_a_gather(i: int) -> None:
        if i == 0:
            now_s[0] += 1.0
            begun.set()
            told["gather"] = gathered.wait(WAIT_S)

    _wrap_reduce(engine, wait_for_a_gather)
    hook = session._gradient
    assert hook is not None
    assert hook._overlap is not None
    hand_over, take_next = hook._overlap.hand_over, hook._overlap._take_next
    purposes = (Purpose.GATHER_BACKWARD, Purpose.GATHER_RECOMPUTE)
    handed_at: list[int] = []

    def gathers() -> int:
        return sum(counters.collectives[p] for p in purposes)

    sent = counters.sent

    def watched_sent(number_of_bytes: int, far_bytes: int = 0) -> None:
        sent(number_of_bytes, far_bytes)
        if handed_at and gathers() > handed_at[0]:
            gathered.set()

    def watched_hand_over(*args: Any, **kwargs: Any) -> Any:
        result = hand_over(*args, **kwargs)
        begun.wait(WAIT_S)
        handed_at.append(gathers())
        in_flight[0] += 1
        peak[0] = max(peak[0], in_flight[0])
        return result

    def watched_take_next() -> None:
        take_next()
        in_flight[0] -= 1

    norm_groups = engine.optimizer._get_norm_groups

    def watched_norm_groups() -> Any:
        before_norm.append(in_flight[0])
        return norm_groups()

    counters.sent = watched_sent
    hook._overlap.hand_over, hook._overlap._take_next = watched_hand_over, watched_take_next
    engine.optimizer._get_norm_groups = watched_norm_groups
    of_its_own = SimpleNamespace(perf_counter=lambda: now_s[0])
    with mock.patch.object(overlap, "time", of_its_own):
        models.train(engine, "llama", 2)
    told["seconds"] = (counters.reduce_s, counters.exposed_reduce_s)
    told["buckets"] = len(handed_at)
    told["peak"], told["limit"] = peak[0], overlap.LIMIT
    told["spares"] = len(hook._overlap._spares)
    told["before norm"] = before_norm
    told["other"] = counters.bytes_sent[Purpose.OTHER]
    engine.destroy()
    return told


def stock_runs_in_the_main_thread(section: dict[str, Any]) -> dict[str, set[str]]:
    """Which threads DeepSpeed's reduction and the exchange's ran in, over warm-up and after it."""
    from deepspeed.runtime.zero import stage3

    fresh()
    stock, seen = stage3.reduce_scatter_coalesced, {"stock": set(), "exchange": set()}

    def noted(tensors: Any, group: Any = None) -> Any:
        seen["stock"].add(threading.current_thread().name)
        return stock(tensors, group)

    stage3.reduce_scatter_coalesced = noted
    try:
        engine = _engine("llama", section, True)
        exchange = ds_ckpt.session_of(engine).exchange.exchange.all_to_all  # type: ignore[union-attr]
        average = exchange.average

        def noted_exchange(*args: Any, **kwargs: Any) -> Any:
            seen["exchange"].add(threading.current_thread().name)
            return average(*args, **kwargs)

        exchange.average = noted_exchange
        models.train(engine, "llama", 4)
        engine.destroy()
    finally:
        stage3.reduce_scatter_coalesced = stock
    return seen


def _no_link() -> None:
    raise ConnectionError("no link to host1")


def failing_exchange(section: dict[str, Any], bucket: int, overlaps: bool) -> dict[str, Any]:
    """One bucket's exchange raises in every process; then training goes on."""
    fresh()
    engine = _engine("llama", section, overlaps)
    session = ds_ckpt.session_of(engine)
    assert session is not None
    models.train(engine, "llama", 2)
    armed = [True]

    def fail(i: int) -> None:
        # `i` counts from the wrapping on; every exchange of the step draws a number
        if armed[0] and i == bucket:
            armed[0] = False
            _no_link()

    _wrap_reduce(engine, fail)
    weights, residuals = models.weights_digest(engine), _digest(session.residuals)
    told: dict[str, Any] = {"message": "", "trace": ""}
    try:
        models.train(engine, "llama", 1, first=2)
    except ConnectionError as error:
        told["message"] = str(error)
        told["trace"] = "".join(traceback.format_tb(error.__traceback__))
    told["weights kept"] = weights == models.weights_digest(engine)
    told["residuals kept"] = residuals == _digest(session.residuals)
    assert session.exchange is not None
    assert session.exchange.feedback is not None
    held = session.exchange.feedback._residuals
    told["pending"] = sorted(name for name, one in held.items() if one.pending is not None)
    told["losses"] = models.train(engine, "llama", 3, first=3)
    engine.destroy()
    told["left"] = threads()
    told["expected"] = _without_third_step(section, overlaps)
    return told


@once
def _without_third_step(section: dict[str, Any], overlaps: bool) -> list[float]:
    """The losses of three steps behind one that never comes."""
    fresh()
    engine = _engine("llama", section, overlaps)
    models.train(engine, "llama", 2)
    losses = models.train(engine, "llama", 3, first=3)
    engine.destroy()
    return losses


def interrupted_backward(section: dict[str, Any], parameter: str) -> dict[str, Any]:
    """Backward raises with buckets on their way; what follows, with overlap and without."""
    told: dict[str, Any] = {}
    for name, overlaps in (("off", False), ("on", True)):
        fresh()
        engine = _engine("llama", section, overlaps)
        models.train(engine, "llama", 2)
        if overlaps:
            _wrap_reduce(engine, lambda i: time.sleep(0.02))
        target = dict(engine.module.named_parameters())[parameter]

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()  # noqa: B023 - of this turn: it runs before the next
            raise ValueError("wrong in backward")

        handle = target.register_hook(spoil)
        try:
            models.train(engine, "llama", 1, first=2)
            told[f"{name} raised"] = False
        except ValueError:
            told[f"{name} raised"] = True
        losses = models.train(engine, "llama", 3, first=3)
        told[name] = _outcome(engine, losses)
        engine.destroy()
        told[f"{name} left"] = threads()
    return told


def ends_in_flight(section: dict[str, Any], how: str) -> dict[str, Any]:
    """Detach or destroy with exchanges on their way; `alone`: process 1 never began any.

    Process 0 then waits in an exchange until the other's end closes its connections.
    """
    fresh()
    engine = _engine("llama", section, True)
    models.train(engine, "llama", 1)
    session = ds_ckpt.session_of(engine)
    assert session is not None
    patience_s, gradient._PATIENCE_S = gradient._PATIENCE_S, 1.0
    alone = how.endswith("alone")
    gate = threading.Event()
    if not alone:
        _wrap_reduce(engine, lambda i: gate.wait(0.3) and None)
    first = "lm_head.weight" if alone and dist.get_rank() == 1 else "model.embed_tokens.weight"
    target = dict(engine.module.named_parameters())[first]

    def stop(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("stop here")

    handle = target.register_hook(stop)
    message = ""
    try:
        models.train(engine, "llama", 1, first=1)
    except (ValueError, RuntimeError) as error:
        message = str(error)
    handle.remove()
    flying = len(session._gradient._overlap._flights)  # type: ignore[union-attr]
    start_s = time.monotonic()
    if how.startswith("destroy"):
        engine.destroy()
    else:
        session.detach()
        engine.destroy()
    took_s = time.monotonic() - start_s
    gradient._PATIENCE_S = patience_s
    dist.barrier()
    limit = time.monotonic() + WAIT_S
    while threads() and time.monotonic() < limit:
        time.sleep(0.01)
    return {"message": message, "flying": flying, "took_s": took_s, "left": threads()}


def dropped_engine(section: dict[str, Any]) -> dict[str, Any]:
    """An engine that trained is dropped without `detach`: its thread before and after."""
    fresh()
    engine = _engine("llama", section, True)
    models.train(engine, "llama", 1)
    running = threads()
    # DeepSpeed's own hooks keep an engine alive: take them off as destroy does
    type(engine).destroy(engine)
    parameter_offload.FWD_MODULE_STACK.clear()
    del engine
    gc.collect()
    return {"running": running, "left": threads()}
