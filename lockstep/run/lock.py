"""An advisory lock on `run/lock`: one trainer per run; the system releases it with a process.

However it ends: a lock that outlived a crash would have to be removed by hand.
"""

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UserError
from lockstep.files import durable
from lockstep.files.untrusted import Refused, open_regular

NAME = "lock"
TRIES, PAUSE = 20, 0.05  # seconds; who only looks is gone by then


@contextlib.contextmanager
def hold_lock(run: Path) -> Iterator[None]:
    """Holds the run's lock.

    Raises:
        UserError: another process holds it, or the directory cannot be written.
    """
    path = run / NAME
    with durable.writing(str(path), "make it writable or name another run"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        _acquire(descriptor, run, fcntl.LOCK_EX, TRIES)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its holder's name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def require_free(run: Path) -> None:
    """Raises UserError if another process trains `run`; writes nothing.

    Several may look at once: a look shares the lock for a moment, and a trainer waits for its end.
    """
    if (run / NAME).is_file():
        descriptor = os.open(run / NAME, os.O_RDONLY)
        try:
            _acquire(descriptor, run, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)


def is_ours(run: Path) -> bool:
    """Says if the lock file exists and is a trainer's: empty, or with its holder's name."""
    try:
        with open_regular(run / NAME, limit=1000) as file:
            return file.read(8) in (b"", b"process ")
    except (OSError, Refused):
        return False


def is_held(run: Path) -> bool:
    """Says if somebody trains `run` now."""
    try:
        require_free(run)
    except UserError:
        return True
    return False


def _acquire(descriptor: int, run: Path, kind: int, tries: int = 1) -> None:
    for number in range(tries):
        time.sleep(PAUSE * (number > 0))
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError:
            pass  # a file system without locks: better unguarded than unusable
        return
    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
    remedy = "stop it first or name another run"
    raise UserError(f"{run}: is being trained by {holder}; {remedy}")
