"""Brings back what backward will ask for: this call's tensors, and those of the calls before it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping

import torch
from torch.autograd import Variable

from ds_ckpt.activation.pieces import Piece
from ds_ckpt.memory.copies import Copies
from ds_ckpt.telemetry.counters import OffloadCounters


class BlockCall:
    """What one recompute runs through: what it keeps goes and comes together.

    One call of one block, or of several that are recomputed together; `blocks` says how many.
    """

    def __init__(self, number: int, label: str) -> None:
        self.number = number
        self.label = label
        self.blocks = 1
        self.pieces: weakref.WeakSet[Piece] = weakref.WeakSet()


class Prefetch:
    """Follows backward from call to call.

    A copy that was brought back is forgotten here when backward has left every call that keeps it,
    at the latest when backward ends. Whoever computes with it holds it himself.

    Args:
        device: where copies are brought to.
        copies: how.
        ahead: how many calls before the one that backward is at.
        calls: those that are alive, by number.
        counters: told of everything.
        at_end: called when a backward has ended; has everything forgotten.
    """

    def __init__(
        self,
        device: torch.device,
        copies: Copies,
        ahead: int,
        calls: MutableMapping[int, BlockCall],
        counters: OffloadCounters,
        at_end: Callable[[], None],
    ) -> None:
        self._device, self._copies, self._ahead = device, copies, ahead
        self._calls, self._counters, self._at_end = calls, counters, at_end
        self._here: weakref.WeakSet[Piece] = weakref.WeakSet()
        """Pieces that have a copy which was brought back."""
        self._reached: set[int] = set()
        self.backward = -1
        """Autograd's number of the backward that asked last; -1 outside of any."""

    def reach(self, call: BlockCall) -> bool:
        """Backward asks for a tensor of `call`; whether that is the call's first."""
        self._follow_backward()
        if call.number in self._reached:
            return False
        self._reached.add(call.number)
        for piece in list(self._here):
            users = [n for n in piece.calls if n in self._calls]
            if all(n in self._reached and n != call.number for n in users):
                self._forget(piece)
        for piece in call.pieces:  # all of them together, before those of other calls
            self.fetch(piece, late=True)
        return True

    def look_ahead(self, call: BlockCall) -> None:
        """Start to bring back what the calls before `call` keep."""
        before = sorted((n for n in self._calls if n < call.number), reverse=True)
        for number in before[: self._ahead]:
            ahead = self._calls.get(number)  # its graph may just have been dropped
            for piece in list(ahead.pieces) if ahead is not None else ():
                self.fetch(piece, late=False)

    def fetch(self, piece: Piece, *, late: bool) -> None:
        """Start to bring a piece back that is not here."""
        if piece.is_here:
            return
        assert piece.host is not None
        piece.fetched = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device)
        piece.arriving = self._copies.copy(piece.host, piece.fetched)
        piece.event = piece.arriving.event
        self._here.add(piece)
        self._counters.back[piece.label] += 1
        self._counters.back_bytes[piece.label] += piece.nbytes
        self._counters.late += late
        self._counters.on_device(piece.nbytes)

    def _follow_backward(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == self.backward:
            return
        self.backward = backward
        self.forget_all()
        if backward != -1:
            mine = weakref.ref(self)  # autograd's engine outlives everything

            def end_of_backward() -> None:
                alive = mine()
                if alive is not None:
                    alive._at_end()

            Variable._execution_engine.queue_callback(end_of_backward)

    def forget_broken_off(self) -> None:
        """Outside of any backward: forget what one that ended with an error has left."""
        if torch._C._current_graph_task_id() == -1 and (self._reached or len(self._here)):
            self.forget_all()

    def _forget(self, piece: Piece) -> None:
        if piece.arriving is not None:
            piece.arriving.wait()
            self._counters.in_vain += 1
        piece.fetched = piece.arriving = None
        self._here.discard(piece)
        self._counters.on_device(-piece.nbytes)

    def forget_all(self) -> None:
        """Forget every copy, and where backward has been."""
        self._reached.clear()
        for piece in list(self._here):
            self._forget(piece)
