"""A training loop that fetches its own data, turned into one that is given a window at a time.

The loop runs in a thread and stands still in its data loader until the next window comes. It and
its caller take turns, as coroutines do: nothing of it runs beside the caller between two windows.
"""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.pending: Future[T] | None = None

    def __iter__(self) -> Iterator[Any]:
        self.started.set_result(None)
        while turn := self.turns.get():
            asked, future = turn
            if callable(asked):
                _answer(future, asked)
            else:
                self.pending = future
                yield from asked
                self.done()
            del turn, asked, future  # they may know the caller, who must be free to go
        raise Closed

    def done(self) -> None:
        if self.pending:
            self.pending.set_result(self.report())
            self.pending = None

    def run(self, loop: Callable[[], Any]) -> None:
        """The thread: the last step is done when the loop returns without asking for more."""
        try:
            loop()
            self.done()
        except Closed:
            self.ended.set_result(None)
        except BaseException as error:
            if self.pending:
                self.pending.set_exception(error)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


def _answer(future: Future, asked: Callable[[], Any]) -> None:
    try:
        future.set_result(asked())
    except BaseException as error:
        future.set_exception(error)


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
        self._require(feed.started)

    def send(self, window: list[Any]) -> Callable[[], T]:
        """Starts a step on its micro-batches; the call it returns waits for the report."""
        future = self._put(window)

        def result() -> T:
            self._require(future)
            return future.result()

        return result

    def call(self, function: Callable[[], Any]) -> Any:
        """What it returns, called where the loop stands, after all windows sent."""
        future = self._put(function)
        return future.result() if self._wait(future) else function()

    def join(self) -> None:
        self.close()
        self.thread.join()

    def _put(self, asked: Any) -> Future:
        future: Future = Future()
        self.feed.turns.put((asked, future))
        return future

    def _require(self, future: Future) -> None:
        if not self._wait(future):
            raise RuntimeError("the loop has ended: all its steps are taken")

    def _wait(self, future: Future) -> bool:
        """Whether it came before the loop's end. Raises what ended the loop, if it crashed."""
        wait([future, self.feed.ended], return_when=FIRST_COMPLETED)
        if not future.done():
            self.feed.ended.result()
        return future.done()
