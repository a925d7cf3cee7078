"""Keeps what blocks need for their recompute in host memory or in an arena, not on the device.

A block call keeps its tensors while it runs and until the next call begins. Then they go out on a
side stream, and the originals are let go before the next call ends. So the last call's stay where
they are: backward asks for them first. When backward comes to a call, the tensors of the calls
before it start to come back, and are there when it gets to them.

Everything is owned by the graph: when autograd frees it, after backward, with a dropped loss or
behind an exception, the pool gets its blocks back. A graph that is retained can ask again.
"""

from __future__ import annotations

import bisect
import copy
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

from ds_ckpt.activation.pieces import BlockCall, Kept, Key, Left, Piece, bytes_of, key_of
from ds_ckpt.activation.snapshot import input_changed
from ds_ckpt.memory.copies import Copies
from ds_ckpt.memory.pool import Arena, HostPool
from ds_ckpt.telemetry.counters import OffloadCounters


class BackwardWatch:
    """Tells one backward from the next.

    Args:
        at_end: bound method that is called when a backward has ended, while its object is alive:
            autograd's engine outlives everything.

    Attributes:
        number: autograd's, of the backward that asked last; -1 outside of any.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = weakref.WeakMethod(at_end)
        self.number = -1

    def began(self) -> bool:
        """Whether another backward asks than before."""
        number = torch._C._current_graph_task_id()
        if number == self.number:
            return False
        self.number = number
        if number != -1:
            Variable._execution_engine.queue_callback(self._ended)
        return True

    def _ended(self) -> None:
        at_end = self._at_end()
        if at_end is not None:
            at_end()


P = ParamSpec("P")
R = TypeVar("R")


def _alone(
    method: Callable[Concatenate[InputStore, P], R],
) -> Callable[Concatenate[InputStore, P], R]:
    """One thread at a time: forwards and backwards of one model may run in several."""

    def locked(self: InputStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    functools.update_wrapper(locked, method)
    return locked


class InputStore:
    """Takes tensors in during forward and gives them out in backward.

    Args:
        device: where the model computes; tensors of other devices are let be.
        copies: how bytes travel.
        pool: host memory; None keeps everything on the device.
        arena: device memory into which tensors are copied when they are kept.
        min_bytes: smaller tensors are let be.
        prefetch: how many block calls ahead of the recompute tensors start to come back.
        owned: parameters and buffers, which are there anyway: what they lie in is let be.
    """

    def __init__(
        self,
        device: torch.device,
        copies: Copies,
        *,
        pool: HostPool | None = None,
        arena: Arena | None = None,
        min_bytes: int = 0,
        prefetch: int = 1,
        owned: Sequence[Tensor] = (),
    ) -> None:
        assert pool is None or arena is None, "what is in the arena stays there"
        self.counters = OffloadCounters()
        self._lock = threading.RLock()
        self._device, self._copies, self._owned = device, copies, owned
        self._owned_at: list[int] | None = None
        """Where these lie, ascending, while the arguments of a call are kept."""
        self._taking_arguments = False
        self._pool, self._arena = pool, arena
        self._min_bytes = min_bytes
        self._pieces: weakref.WeakValueDictionary[Key, Piece] = weakref.WeakValueDictionary()
        self._calls: weakref.WeakValueDictionary[int, BlockCall] = weakref.WeakValueDictionary()
        self._number = 0
        self._last: weakref.ref[BlockCall] | None = None
        self._leaving: weakref.WeakSet[Piece] = weakref.WeakSet()
        self._dead: deque[dict[str, Any]] = deque()
        """What pieces had that have died."""
        self._watch, self._ahead = BackwardWatch(self._backward_ended), prefetch
        self._here: weakref.WeakSet[Piece] = weakref.WeakSet()
        """Pieces that have a copy which was brought back."""
        self._reached: set[int] = set()
        """Numbers of the calls to which this backward has come."""

    # -- forward ---------------------------------------------------------------------------------

    @_alone
    def begin(self, label: str) -> BlockCall:
        """A block is about to keep its tensors."""
        self.collect()
        if torch._C._current_graph_task_id() == -1 and (self._reached or len(self._here)):
            self._forget_all()  # of a backward that ended with an error
        self._number += 1
        self._owned_at, self._taking_arguments = None, True
        call = BlockCall(self._number, label)
        self._calls[call.number] = call
        return call

    @_alone
    def pack(self, tensor: Tensor, call: BlockCall) -> Kept | Left:
        """What `call` holds in the place of `tensor`."""
        reason = self._unfit(tensor)
        piece = None if reason is not None else self._piece_of(tensor)
        if piece is None:
            if reason is None:
                small = tensor.numel() == 0 or tensor.nbytes < self._min_bytes
                reason = "small" if small else self._owned_by_model(tensor)
            if reason is not None:
                self.counters.left[reason] += 1
                return Left(tensor, call.label)
            piece = Piece(tensor, call.label, self._dead)
            self._pieces[piece.key] = piece
            self.counters.on_device(piece.nbytes)
            if self._arena is not None:
                self._into_arena(piece, self._arena)
        piece.calls.add(call.number)
        call.pieces.add(piece)
        return Kept(tensor, piece, call)

    @_alone
    def again(self, kept: Kept, call: BlockCall) -> Kept:
        """What `call` holds of the same tensor, which need not be here any more."""
        other = copy.copy(kept)
        other.call = call
        kept.piece.calls.add(call.number)
        call.pieces.add(kept.piece)
        return other

    def _piece_of(self, tensor: Tensor) -> Piece | None:
        """What is kept of the same storage already, unchanged since."""
        piece = self._pieces.get(key_of(tensor))
        if piece is not None:
            piece.look()
        return piece if piece and piece.unchanged(tensor) else None

    def _unfit(self, tensor: Tensor) -> str | None:
        if type(tensor) is not Tensor:
            return f"a {type(tensor).__name__}"
        if tensor.layout != torch.strided or tensor.is_quantized:
            return "not a plain strided tensor"
        if tensor.device != self._device:
            return f"on {tensor.device.type}"
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return "an inference, conjugate or negative view"
        return None

    def unfit(self, tensor: Tensor) -> str | None:
        """Why the tensor must be let be whatever its size; None where it need not."""
        return self._unfit(tensor) or self._owned_by_model(tensor)

    def _owned_by_model(self, tensor: Tensor) -> str | None:
        # ZeRO-3 gives a parameter another storage at each gather: none falls between the arguments
        # of a call, before it runs.
        if self._owned_at is None or not self._taking_arguments:
            self._owned_at = sorted(p.data_ptr() for p in self._owned if p.layout == torch.strided)
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        behind = bisect.bisect_left(self._owned_at, start)
        if behind < len(self._owned_at) and self._owned_at[behind] < start + storage.nbytes():
            return "a part of the model"
        return None

    @_alone
    def started(self, call: BlockCall) -> None:
        """The call has kept its arguments and runs: those of the calls before it may go."""
        self._taking_arguments = False
        earlier = self.last
        if earlier is not None and earlier is not call:
            self._send(earlier, current=call.number)
        self._last = weakref.ref(call)

    @property
    def last(self) -> BlockCall | None:
        """The call that ran last, while a graph holds what it kept."""
        return self._last() if self._last is not None else None

    @_alone
    def ended(self, call: BlockCall) -> None:
        """The call has run."""
        self._let_go(only_done=False)

    def _send(self, call: BlockCall, current: int) -> None:
        if self._pool is None:
            return
        for piece in list(call.pieces):
            if piece.host is not None or piece.source is None or current in piece.calls:
                continue
            piece.look()
            if piece.changed:  # backward will say so, if it ever comes
                continue
            piece.host = self._pool.take((piece.nbytes,), torch.uint8)
            piece.leaving = self._copies.copy(bytes_of(piece.source, piece.stretch), piece.host)
            self._leaving.add(piece)
            self.counters.out[piece.label] += 1
            self.counters.out_bytes[piece.label] += piece.nbytes
        self._let_go(only_done=True)

    def _let_go(self, *, only_done: bool) -> None:
        """Drop originals whose copies are out; the compute stream waits for those that are not."""
        for piece in list(self._leaving):
            assert piece.leaving is not None
            if only_done and not piece.leaving.done():
                continue
            piece.leaving.wait()
            piece.look()
            piece.source = piece.leaving = None
            self._leaving.discard(piece)
            self.counters.on_device(-piece.nbytes)

    def _into_arena(self, piece: Piece, arena: Arena) -> None:
        assert piece.source is not None
        slot = arena.room(piece.nbytes)
        if slot is None:
            self.counters.left["no room in the arena"] += 1
            return
        slot.copy_(bytes_of(piece.source, piece.stretch))  # on the compute stream: in order
        piece.slot, piece.source = slot, None

    # -- backward --------------------------------------------------------------------------------

    @_alone
    def unpack(self, kept: Kept | Left) -> Tensor:
        """The tensor again, on the device.

        Raises:
            UnsupportedError: the original was changed in place after it had been kept.
        """
        self.collect()
        if isinstance(kept, Left):
            return kept.again()
        call, piece = kept.call, kept.piece
        assert isinstance(call, BlockCall)
        first = self._reach(call)
        piece.look()
        if piece.changed:
            raise input_changed(piece.label, "input")
        view = self.take(kept)
        if first:
            self._look_ahead(call)
        return view

    @_alone
    def reach(self, call: BlockCall) -> None:
        """Backward has come to `call`: its tensors and those of the calls before it come back."""
        if self._reach(call):
            self._look_ahead(call)

    @_alone
    def take(self, kept: Kept | Left) -> Tensor:
        """The tensor on the device, for whoever knows that it was not changed in place."""
        if isinstance(kept, Left):
            return kept.tensor
        piece = kept.piece
        if piece.source is not None or piece.slot is not None:
            self.counters.kept[piece.label] += piece.asked != self._watch.number
        self._fetch(piece, late=True)
        if piece.arriving is not None:
            piece.arriving.wait()
            piece.arriving = None
        piece.asked = self._watch.number
        return kept.view()

    def _reach(self, call: BlockCall) -> bool:
        """Backward asks for a tensor of `call`; whether that is the call's first.

        A copy that was brought back is forgotten when backward has left every call that keeps it,
        at the latest when backward ends. Whoever computes with it holds it himself.
        """
        if self._watch.began():
            self._forget_all()
        if call.number in self._reached:
            return False
        self._reached.add(call.number)
        for piece in list(self._here):
            users = [n for n in piece.calls if n in self._calls]
            if all(n in self._reached and n != call.number for n in users):
                self._forget(piece)
        for piece in call.pieces:  # all of them together, before those of other calls
            self._fetch(piece, late=True)
        return True

    def _look_ahead(self, call: BlockCall) -> None:
        """Start to bring back what the calls before `call` keep."""
        before = sorted((n for n in self._calls if n < call.number), reverse=True)
        for number in before[: self._ahead]:
            ahead = self._calls.get(number)  # its graph may just have been dropped
            for piece in list(ahead.pieces) if ahead is not None else ():
                self._fetch(piece, late=False)

    def _fetch(self, piece: Piece, *, late: bool) -> None:
        """Start to bring a piece back that is not here."""
        if piece.is_here:
            return
        assert piece.host is not None
        piece.fetched = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device)
        piece.arriving = self._copies.copy(piece.host, piece.fetched)
        self._here.add(piece)
        self.counters.back[piece.label] += 1
        self.counters.back_bytes[piece.label] += piece.nbytes
        self.counters.late += late
        self.counters.on_device(piece.nbytes)

    def _forget(self, piece: Piece) -> None:
        if piece.arriving is not None:
            piece.arriving.wait()
            self.counters.in_vain += 1
        piece.fetched = piece.arriving = None
        self._here.discard(piece)
        self.counters.on_device(-piece.nbytes)

    def _forget_all(self) -> None:
        """Forget every copy, and where backward has been."""
        self._reached.clear()
        for piece in list(self._here):
            self._forget(piece)

    @_alone
    def _backward_ended(self) -> None:
        self._forget_all()
        self.collect()

    # -- the dead --------------------------------------------------------------------------------

    @_alone
    def collect(self) -> None:
        """Give back what the graphs that have died since held."""
        while self._dead:
            piece = self._dead.popleft()
            for ticket in (piece["leaving"], piece["arriving"]):
                if ticket is not None:
                    ticket.wait()
            if piece["host"] is not None and self._pool is not None:
                self._pool.give_back(piece["host"])
            if piece["slot"] is not None and self._arena is not None:
                self._arena.give_back(piece["slot"])
            self.counters.on_device(-piece["device_bytes"])

    @property
    def nbytes_on_host(self) -> int:
        """Bytes of the pieces that have a copy in host memory now."""
        self.collect()
        return sum(p.nbytes for p in self._pieces.values() if p.host is not None)
