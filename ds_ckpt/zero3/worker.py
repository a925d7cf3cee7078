"""One thread that does calls in the order in which they were given. Knows nothing of DeepSpeed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class _Word(Enum):
    GO_ON = "do again what comes from here on"
    END = "end the thread"


_Item = tuple["Future[Any]", Callable[[], Any]] | _Word


@dataclass
class _Inbox:
    """What the thread and its owner share, so that the thread keeps nothing else alive."""

    items: queue.SimpleQueue[_Item] = field(default_factory=queue.SimpleQueue)
    failed: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)


class Worker:
    """A daemon thread, started with the first call.

    After a call that raised, later ones are cancelled until `go_on`: collectives of one group must
    not run on past one that is missing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox = _Inbox()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have `call` done after all earlier ones. Its exception comes with `Future.result`."""
        if self._thread is None:
            self._inbox = _Inbox()
            self._thread = threading.Thread(
                target=_serve, args=(self._inbox,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future[Any] = Future()
        self._inbox.items.put((future, call))
        return future

    def go_on(self) -> None:
        """After a call that raised: what is submitted from now on is done again."""
        if self._inbox.failed.is_set():
            self._inbox.items.put(_Word.GO_ON)

    def close(self, patience_s: float) -> bool:
        """Cancel what waits and end the thread; a later `submit` starts another.

        Returns:
            False where the call under way was not done within `patience_s`. Nobody waits for it any
            more; the thread ends with it.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._inbox.closed.set()
        self._inbox.items.put(_Word.END)
        if thread is threading.current_thread():  # a finalizer that the collector ran here
            return True
        thread.join(patience_s)
        return not thread.is_alive()


def _serve(inbox: _Inbox) -> None:
    while (item := inbox.items.get()) is not _Word.END:
        if item is _Word.GO_ON:
            inbox.failed.clear()
            continue
        assert isinstance(item, tuple)
        future, call = item
        if inbox.failed.is_set() or inbox.closed.is_set():
            future.cancel()
        elif future.set_running_or_notify_cancel():
            _do(future, call, inbox)
        del item, future, call  # an idle thread keeps no gradient alive


def _do(future: Future[Any], call: Callable[[], Any], inbox: _Inbox) -> None:
    try:
        result = call()
    except BaseException as error:
        inbox.failed.set()  # before anybody can know of the error
        future.set_exception(error)
    else:
        future.set_result(result)
