"""Handles Ctrl-C and SIGTERM for the training loop."""

import signal
from collections.abc import Callable


class StopSignal:
    """A handler by which a signal stops the loop after its step; a second one ends the process.

    Never by an exception, which a framework's native code need not survive.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, before_end: Callable[[], object]) -> None:
        """`before_end` is called before a second signal ends the process."""
        self.before_end, self.received = before_end, False

    def __enter__(self) -> "StopSignal":
        heeded = [n for n in self.SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]  # nohup, &
        self.former = {number: signal.signal(number, self._receive) for number in heeded}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if self.received:
            self.before_end()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = True
