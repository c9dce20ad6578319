"""Exit statuses, and a command's end with one: only a bug has a traceback."""

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from lockstep.errors import UserError

# FAILED: the command did its work, and the answer is no.
# INCOMPLETE: not enough was compared for an answer.
DONE, FAILED, MISTAKE, DIVERGED, INCOMPLETE, STOPPED = 0, 1, 2, 3, 4, 130


def exit_status(command: Callable[[], int], *, interruptible: bool = False) -> int:
    """Runs a command; a user's mistake is one line on stderr and `MISTAKE`.

    Args:
        interruptible: Ctrl-C is a KeyboardInterrupt to it: it computes nothing itself, and has
            something to end or to say.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a model writes what no terminal may be able to
            stream.reconfigure(errors="backslashreplace")
    try:
        with contextlib.nullcontext() if interruptible else _end_on_ctrl_c():
            status = command()
            sys.stdout.flush()
            return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        if not any(map(_is_left, (sys.stdout, sys.stderr))):  # but a pipe of the command's own
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED


def _is_left(stream: TextIO) -> bool:
    """Say if a stream's reader has gone, as `| head` does after its lines."""
    ends = select.poll()
    ends.register(stream, 0)  # an error is told unasked
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in ends.poll(0))


@contextlib.contextmanager
def _end_on_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, as SIGTERM does, unless the loop must save.

    As an exception in the middle of a framework's native code it crashes or hangs the process.
    """
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler:  # not so under nohup or &
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
