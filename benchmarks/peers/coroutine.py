"""A training loop that fetches its own data, turned into one that is given a window at a time.

The loop runs in a thread and stands still in its data loader until the next window comes. It and
its caller take turns, as coroutines do: nothing of it runs beside the caller between two windows.
"""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ENDED = "the loop has ended: all its steps are taken"


class Closed(Exception):
    """Ends the loop from inside its data loader."""


class Feed(Generic[T]):
    """The loop's side: iterated, the micro-batches of each window in turn.

    Args:
        report: called in the loop's thread when it comes back for more: its step is done.
    """

    def __init__(self, report: Callable[[], T]) -> None:
        self.report = report
        self.turns: SimpleQueue[tuple[Any, Future] | None] = SimpleQueue()
        self.pending: Future = Future()

    def __iter__(self) -> Iterator[Any]:
        while turn := self.turns.get():
            asked, self.pending = turn
            del turn  # it may know the caller, who must be free to go
            if callable(asked):
                self.pending.set_result(asked())
            else:
                yield from asked
                self.pending.set_result(self.report())
            del asked
        raise Closed

    def run(self, loop: Callable[[], Any]) -> None:
        """The thread: the loop, and behind its end an answer to whoever still asks."""
        failure: Exception | None = None
        try:
            loop()
            if not self.pending.done():  # the last step: it asks for no more
                self.pending.set_result(self.report())
        except Closed:
            return
        except Exception as error:
            failure = error
            if not self.pending.done():
                self.pending.set_exception(error)
        for asked, future in iter(self.turns.get, None):
            if callable(asked) and not failure:
                future.set_result(asked())
            else:
                future.set_exception(failure or RuntimeError(ENDED))
            del asked, future


class Coroutine(Generic[T]):
    """The caller's side. The thread ends with this object: it does not know of it."""

    def __init__(self, feed: Feed[T], loop: Callable[[], Any]) -> None:
        """Starts `loop`, which must take its micro-batches from `feed`; returns when it asks.

        Raises:
            Exception: whatever ended the loop before it asked.
        """
        self.feed = feed
        self.thread = Thread(target=feed.run, args=(loop,), daemon=True)
        self.close = weakref.finalize(self, feed.turns.put, None)
        self.thread.start()
        self.call(lambda: None)

    def send(self, window: list[Any]) -> Callable[[], T]:
        """Starts a step on its micro-batches; the call it returns waits for the report."""
        return self._put(window).result

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function where the loop stands, after all windows sent; returns its result."""
        return self._put(function).result()

    def join(self) -> None:
        self.close()
        self.thread.join()

    def _put(self, asked: Any) -> Future:
        future: Future = Future()
        self.feed.turns.put((asked, future))
        return future
